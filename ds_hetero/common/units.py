"""Factors from the units that people write to SI base units: a value in GB times `GB` is in bytes.

Inside the program every number is in SI base units with the unit in its name. Only what reads or writes for people
uses these factors.
"""

GB = 1e9  # bytes, as in bandwidths
GIB = 2**30  # bytes, as in sizes of memory
TERA = 1e12  # as in TFLOPS
MICRO = 1e-6  # as in microseconds
