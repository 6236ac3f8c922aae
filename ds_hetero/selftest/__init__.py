"""The checks of ``ds-hetero selftest``, one file per check: do the ranks do all that training needs, and correctly?"""
