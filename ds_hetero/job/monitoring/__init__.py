"""Monitoring of a running job: where its time goes, who is told, and what changes because of it."""
