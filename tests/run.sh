#!/usr/bin/env bash
# Runs the tests in .venv, installing what they need first: bash tests/run.sh [PYTEST ARGUMENTS]
# Without arguments: all but those marked slow, which CI runs too. Unit tests are one process each and share the cores;
# tests of ranks need the cores themselves.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash install.sh test
pytest() { .venv/bin/python -m pytest --quiet "$@"; }
if [ $# -gt 0 ]; then
    pytest "$@"
else
    pytest -m "not slow" --numprocesses 2 tests/unit
    pytest -m "not slow" tests/dist tests/integration
fi
