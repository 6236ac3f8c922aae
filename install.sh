#!/usr/bin/env bash
# Installs ds_hetero and what it needs into .venv, from this clone, editable: bash install.sh [EXTRA]
# Without EXTRA it is the planner and the command line. EXTRA is "train" (torch, DeepSpeed, transformers, accelerate), "test"
# (that and what tests/run.sh and .ci/run need), "flash" or "triton"; several are joined by commas.
# Does nothing that is done already. PYTHON names the interpreter of a new .venv, python3 when not set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

extra=${1:-}
target=".${extra:+[$extra]}"
done_mark=".venv/installed${extra:+-$extra}"
# A linked .venv is that of another clone. What runs in it imports that clone's package, and an editable install would
# make that clone import this one's.
if [ -L .venv ]; then
    echo "install.sh: .venv is a link to $(readlink .venv), the environment of another clone. Remove the link." >&2
    exit 1
fi
[ "$done_mark" -nt setup.cfg ] && exit 0

[ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
pip() { .venv/bin/python -m pip -qq --disable-pip-version-check "$@"; }

echo "installing ds_hetero${extra:+ with [$extra]} into .venv, which takes some minutes" >&2
if [[ ",$extra," == *,train,* || ",$extra," == *,test,* ]]; then
    # torch comes first and alone: the release that the tests run on, in the build that the machine's package index offers.
    .venv/bin/python -c "import importlib.metadata as m; m.version('torch')" 2>/dev/null || pip install torch==2.13.0
fi
pip install --editable "$target"
if [[ ",$extra," == *,test,* ]]; then
    # Reads traces in a test; what it requires besides (JupyterLab and more) is for its notebooks.
    pip install --no-deps HolisticTraceAnalysis==0.5.0
fi
touch "$done_mark"
