#!/usr/bin/env bash
# Tests with the oldest releases of frameworks that setup.cfg admits: bash tests/oldest.sh
# The environment is in .cache/matrix. It holds what differs from .venv. Other combinations: .ci/matrix.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec .venv/bin/python -m tests.matrix --oldest
