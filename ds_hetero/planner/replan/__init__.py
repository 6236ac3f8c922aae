"""Re-planning while a job runs: when a new schedule is worth it, and which."""
