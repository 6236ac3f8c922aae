#!/usr/bin/env bash
# Runs the tests in .venv, installing what they need first: bash tests/run.sh [PYTEST ARGUMENTS]
# Without arguments: all but those marked slow, which CI runs too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash install.sh test
[ $# -gt 0 ] || set -- -m "not slow"
exec .venv/bin/python -m pytest --quiet "$@"
