"""Modules that the server imports from which invocations of the command line are forked."""

from __future__ import annotations

import matplotlib.backends.backend_svg  # noqa: F401
import rich.console
import rich.table  # noqa: F401
import torch  # noqa: F401
import yaml  # noqa: F401
