"""Public example configurations of four frameworks, shrunk to tiny models and trained on unequal ranks.

python -m tests.recipes --help
"""
