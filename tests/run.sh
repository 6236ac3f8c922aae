#!/usr/bin/env bash
# Runs the tests in .venv, installing what they need first: bash tests/run.sh [--slow | --all] [PYTEST ARGUMENTS]
# Without arguments: all but those marked slow; with --slow alone, these too, as CI does; with --all alone, every case of the
# sweeps as well. Two tests run at a time, one file on one worker; those marked "alone" wait in real time, or need both
# cores, and run after the others. Last come some on ranks that wait as on NCCL (tests/strict_group.py).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash install.sh test
unset PYTHONDONTWRITEBYTECODE # every rank and every command that tests start would compile this package again
sweeps=()
pytest() { .venv/bin/python -m pytest --quiet "${sweeps[@]}" "$@"; }
marked="not slow"
case "${1:-}" in
    --slow) marked="slow or not slow" && shift ;;
    --all) marked="slow or not slow" && sweeps=(--whole-sweeps) && shift ;;
esac
if [ $# -gt 0 ]; then
    pytest "$@"
else
    pytest -m "not alone and ($marked)" --numprocesses 2 --dist loadfile tests/unit
    pytest -m "not alone and ($marked)" --numprocesses 2 --dist loadfile tests/dist tests/integration
    pytest -m "alone and ($marked)"
    # Kinds of jobs that no test runs by itself on ranks that connect, wait and stay silent as NCCL's do.
    STRICT_GROUP=1 pytest --numprocesses 2 --dist loadfile \
        tests/dist/test_gradient_sync.py \
        "tests/integration/zero/test_zero_within_nodes.py::test_training_equals_that_of_one_process[small buckets]" \
        "tests/integration/zero/test_zero_within_nodes.py::test_between_nodes_only_gradients_travel_and_once_a_step[1]" \
        "tests/integration/loops/test_documents.py::test_a_plain_loop_trains_as_one_process[2 ranks]" \
        "tests/integration/job/test_selftest.py::test_ranks_that_work_pass[2-options1]"
fi
