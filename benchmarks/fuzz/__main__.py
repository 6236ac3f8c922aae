"""Feed mutated inputs to ds_hetero: which ones end in a traceback, hang, or are accepted although they make no sense?

    python -m benchmarks.fuzz                        # 30,000 mutations and 500 invocations, some minutes
    python -m benchmarks.fuzz --count 3000 --seed 7
    python -m benchmarks.fuzz --count 0              # the command line alone

Valid examples of every kind of input are changed at one to three places, as objects or as text, and read in this
process. Then every command of ``ds-hetero`` is invoked with one mutation of an input file or of its options, in a
process each. Accepted values must have the invariants of their kind, and finite, positive predictions. The exit code is
1 if a mutation ended in anything but a clear error or a valid value, or if fewer than 99 % of the errors after a single
change name the changed key.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.fuzz.commands import COMMANDS, CommandLine
from benchmarks.fuzz.kinds import KINDS
from benchmarks.fuzz.trials import Tally, fuzz

MIN_NAMED_SHARE = 0.99
_MAX_PROFILES = 10  # of which each takes seconds
_COLUMNS = ("accepted", "clear error", "traceback", "hang", "nonsense")


def main() -> int:
    """Fuzz every kind and every command and print a table; return 1 if there was a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=30_000, help="mutations over all kinds, through the readers")
    parser.add_argument("--commands", type=int, default=500, help="invocations over all commands")
    parser.add_argument("--only", metavar="NAME", help="kinds and commands whose name has this in it", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unnamed", action="store_true", help="print errors that do not name what was changed")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    print(f"{'input':<20} {'tried':>7} " + " ".join(f"{c:>12}" for c in _COLUMNS) + f" {'names the key':>16}")
    tallies = {}
    for name, kind in KINDS.items():
        if options.count and options.only in name:
            tallies[name] = fuzz(kind, options.count // len(KINDS), random.Random(f"{options.seed} {name}"))
            _print_row(name, tallies[name])
    if options.commands:
        with tempfile.TemporaryDirectory(prefix="ds_hetero_fuzz_") as scratch:
            command_line = CommandLine(Path(scratch))
            for name in (name for name in COMMANDS if options.only in name):
                share = -(-options.commands // (len(COMMANDS) - 1))
                count = min(share, _MAX_PROFILES) if name == "profile" else share  # it takes seconds, whatever it finds
                tallies[name] = command_line.fuzz(name, count, random.Random(f"{options.seed} {name}"))
                _print_row(name, tallies[name])
    for name, tally in tallies.items():
        _print_faults(name, tally, options.unnamed)
    single, named = (sum(getattr(tally, field) for tally in tallies.values()) for field in ("single", "named"))
    print(f"\n{named:,} of {single:,} errors after one change name what was changed")
    is_clean = all(tally.is_clean for tally in tallies.values())
    return 0 if is_clean and named >= MIN_NAMED_SHARE * single else 1


def _print_row(name: str, tally: Tally) -> None:
    counts = " ".join(f"{tally.outcomes[column]:>12,}" for column in _COLUMNS)
    print(f"{name:<20} {tally.outcomes.total():>7,} {counts} {f'{tally.named} of {tally.single}':>16}", flush=True)


def _print_faults(name: str, tally: Tally, with_unnamed: bool) -> None:
    for fault, times in Counter(fault.split("\n")[0] for fault in tally.faults).most_common(20):
        example = next(text for text in tally.faults if text.startswith(fault))
        print(f"\n{name}, {times} times: {example}")
    if with_unnamed:
        print("".join(f"\n{name}, not named: {text}" for text in tally.unnamed))


if __name__ == "__main__":
    sys.exit(main())
