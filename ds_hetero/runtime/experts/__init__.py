"""Experts of a mixture that live on the ranks of a replica in unequal numbers: tokens travel to them and back."""
