"""Dispatch ``python -m benchmarks.documents COMMAND`` to the commands of this folder."""

from __future__ import annotations

import sys

from benchmarks.documents import lane_order, plan, remap, routes, run

COMMANDS = {
    "lane_order": lane_order.main,
    "plan": plan.main,
    "remap": remap.main,
    "routes": routes.main,
    "run": run.main,
}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        sys.exit(f"usage: python -m benchmarks.documents {{{','.join(COMMANDS)}}} ...")
    sys.exit(COMMANDS[sys.argv[1]](sys.argv[2:]))
