"""The first ten minutes on a rented GPU, rehearsed on CPUs: which defaults do they confirm or contradict?"""
