"""A transformers model that is split over the sequence: how it is entered, called and left."""
