"""Announce a line to the user: in the log if the script enables INFO, else on stderr."""

from __future__ import annotations

import sys

from ds_hetero.common.terminal import fitted_text, terminal_width

PREFIX = "ds_hetero: "


def announce(text: str) -> None:
    """Log the text if the script enables INFO for this package; otherwise print it to stderr, wrapped to a terminal."""
    import logging  # here, since planning does without it and starts faster

    logger = logging.getLogger("ds_hetero")
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", text)
    else:
        width = terminal_width(sys.stderr) if sys.stderr.isatty() else None  # a log file gets whole lines, always
        print(fitted_text(f"{PREFIX}{text}", width), file=sys.stderr, flush=True)
