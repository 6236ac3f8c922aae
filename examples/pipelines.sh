#!/usr/bin/env bash
# Unequal pipelines, from a fresh clone: installs into .venv and runs examples/pipelines.py: bash examples/pipelines.sh [OPTIONS]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash install.sh train

export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
export PYTHONWARNINGS=ignore::FutureWarning # torch's, about names that DeepSpeed uses

launch() { # NUM_PROCESSES [OPTIONS]
    local port
    port=$(.venv/bin/python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
    .venv/bin/deepspeed --quiet --num_gpus "$1" --no_local_rank --master_port "$port" examples/pipelines.py "${@:2}"
}

launch 1 "$@"
launch 4 "$@"
