"""Decisions of rank 0 at the start of a job: what the section asks for, the plan and its prediction. No torch."""
