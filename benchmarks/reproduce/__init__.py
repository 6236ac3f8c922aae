"""Published tables and figures, rebuilt; one module per paper, each a command."""
