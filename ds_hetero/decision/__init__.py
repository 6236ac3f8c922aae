"""Decisions of rank 0 at the start of a job: the plan that the section asks for, and its prediction. No torch."""
