#!/usr/bin/env bash
# Runs the tests in .venv, installing what they need first: bash tests/run.sh [PYTEST ARGUMENTS]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash install.sh test
exec .venv/bin/python -m pytest --quiet "$@"
