"""Keys and values round the groups, and gradients home: the lanes of a batch on one rank."""
