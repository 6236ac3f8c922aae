"""Adapter of DeepSpeed: its engine, ZeRO optimizers and checkpoints. Only here are DeepSpeed's private names used."""
