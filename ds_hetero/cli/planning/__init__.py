"""Commands that plan and predict."""
