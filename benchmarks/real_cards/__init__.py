"""Predictions of the planning half against public measurements of real cards: no GPU, no torch."""
