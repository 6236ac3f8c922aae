"""The start and the life of a job: what the ranks agree on, what is predicted, and how the steps go."""
