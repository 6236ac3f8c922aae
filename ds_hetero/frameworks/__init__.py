"""Adapters of DeepSpeed, transformers, accelerate and TRL. ``names.py`` of each lists private names that it uses."""
