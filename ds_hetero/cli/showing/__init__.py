"""Commands that draw plans, runs and steps."""
