"""Parts of the search for a schedule: groups of ranks, shares of tokens and heads, ring orders, descent."""
