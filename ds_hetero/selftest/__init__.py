"""Does everything that training needs work on these ranks? What ``ds-hetero selftest`` runs, one file per check."""
