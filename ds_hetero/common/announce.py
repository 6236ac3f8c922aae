"""A line for people, once: in the log if the script shows it, else on stderr."""

from __future__ import annotations

import sys


def announce(text: str) -> None:
    """Log the text if the script enables INFO of this package; print it to stderr otherwise."""
    import logging  # here, since planning does without it and starts faster

    logger = logging.getLogger("ds_hetero")
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", text)
    else:
        print(f"ds_hetero: {text}", file=sys.stderr, flush=True)
