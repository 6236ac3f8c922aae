"""Cost models of pipeline stages: time and memory of one stage, and the time of a pipeline of them. No torch."""
