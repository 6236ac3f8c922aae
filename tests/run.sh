#!/usr/bin/env bash
# Runs the tests in .venv, installing what they need first: bash tests/run.sh [--slow | --all] [PYTEST ARGUMENTS]
# Without arguments: all but those marked slow; with --slow alone, these too, as CI does; with --all alone, every case of the
# sweeps as well. Two tests run at a time, one file on one worker; those marked "alone" wait in real time, or need both
# cores, and run after the others. What else a machine has to do may delay a test, so that it fails: without arguments each
# may fail once, and is then listed under "rerun". Half of the tests with ranks run on gloo, the other half on ranks that wait as on NCCL
# (tests/strict_group.py); which half changes with every commit. STRICT_GROUP=1 before the command: all of them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash install.sh test
unset PYTHONDONTWRITEBYTECODE # every rank and every command that tests start would compile this package again
sweeps=()
pytest() { .venv/bin/python -m pytest --quiet "${sweeps[@]}" "$@"; }
half=$(($(git rev-list --count HEAD 2>/dev/null || echo 0) % 2))
marked="not slow"
case "${1:-}" in
    --slow) marked="slow or not slow" && shift ;;
    --all) marked="slow or not slow" && sweeps=(--whole-sweeps) && shift ;;
esac
if [ $# -gt 0 ]; then
    pytest "$@"
else
    pytest -m "not alone and ($marked)" --reruns 1 -r R --numprocesses 2 --dist loadfile tests/unit
    pytest -m "not alone and ($marked)" --reruns 1 -r R --strict-half "$half" --numprocesses 2 --dist loadfile \
        tests/dist tests/integration
    pytest -m "alone and ($marked)" --reruns 1 -r R --strict-half "$half"
fi
