"""Adapter of TRL: its trainers, those that generate completions, and their state in an elastic job."""
