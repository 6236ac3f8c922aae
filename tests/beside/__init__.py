"""Axolotl, LLaMA-Factory and ms-swift beside this engine, each installed in an environment of its own."""
