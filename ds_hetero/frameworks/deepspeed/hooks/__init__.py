"""Hooks around the methods of DeepSpeed's engine."""
