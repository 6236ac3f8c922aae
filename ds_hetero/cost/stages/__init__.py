"""Stages of pipelines: what one costs, and how long a pipeline of them takes. No torch."""
