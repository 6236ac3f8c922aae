"""The command ``ds-hetero``: tables for people, ``--json`` for machines, exit code 2 and one message for bad input."""

from ds_hetero.cli.app import main

__all__ = ["main"]
