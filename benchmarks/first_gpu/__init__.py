"""The first ten minutes on a rented GPU, rehearsed on CPUs: which defaults they confirm or contradict."""
