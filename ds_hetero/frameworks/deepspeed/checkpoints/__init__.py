"""Checkpoints of DeepSpeed's engine: saved whole, and loaded under any layout of their parts."""
