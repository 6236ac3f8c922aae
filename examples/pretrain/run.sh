#!/usr/bin/env bash
# Pretrains a small Llama on unequal ranks, from a fresh clone: installs into .venv, trains, draws runs/pretrain/losses.png.
#
#   bash examples/pretrain/run.sh                      three processes of unequal shares, about ten minutes on two cores
#   bash examples/pretrain/run.sh --quick              a tiny model for some steps, under two minutes
#   bash examples/pretrain/run.sh --ranks 1            one process; the picture then shows both runs
#
# Further options: --script loop|trainer, --launcher torchrun|deepspeed|accelerate|elastic, --out FOLDER of this run,
# whose neighbours the picture shows too. All others go to the script.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

script=loop launcher=torchrun ranks=3 out= quick=()
options=()
while [ $# -gt 0 ]; do
    case $1 in
        --quick) quick=(--size tiny --row-tokens 256 --steps 60 --eval-every 20 --eval-rows 4 --save-every 30) ;;
        --script) script=$2 && shift ;;
        --launcher) launcher=$2 && shift ;;
        --ranks) ranks=$2 && shift ;;
        --out) out=$2 && shift ;;
        *) options+=("$1") ;;
    esac
    shift
done
case $ranks in
    1) speeds=1 ;;
    2) speeds=2,1 ;;
    3) speeds=2,1,1 ;;
    4) speeds=4,3,2,1 ;;
    *) echo "--ranks takes 1 to 4, got $ranks" >&2 && exit 2 ;;
esac

[ -x .venv/bin/deepspeed ] || bash install.sh train

export DS_ACCELERATOR=cpu
export OMP_NUM_THREADS=1
[ "$ranks" -gt 1 ] || OMP_NUM_THREADS=$(nproc)
export PYTHONWARNINGS=ignore::FutureWarning # torch's, about names that DeepSpeed uses

out=${out:-runs/pretrain/$script-$launcher-$ranks${quick:+-quick}}
command=("examples/pretrain/$script.py" --out "$out" --speeds "$speeds" "${quick[@]}" "${options[@]}")
port=$(.venv/bin/python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')

run_nodes() { # an elastic job of nodes with one rank each: kill one, and the others go on
    local node processes=()
    for ((node = 0; node < ranks; node++)); do
        local address=(--listen "127.0.0.1:$port")
        [ "$node" = 0 ] || address=(--listen 127.0.0.1 --join "127.0.0.1:$port")
        .venv/bin/python -m ds_hetero.run --elastic --job "pretrain-$port" --node "n$node" --workers 1 \
            --ranks "$ranks" "${address[@]}" "${command[@]}" &
        processes+=($!)
    done
    echo "the processes of the nodes: ${processes[*]}"
    trap 'kill "${processes[@]}" 2>/dev/null || true' EXIT
    local process finished=0
    for process in "${processes[@]}"; do
        if wait "$process"; then finished=$((finished + 1)); fi
    done
    [ "$finished" -gt 0 ] # nodes that were killed end with an error, the job does not
}

case $launcher in
    torchrun) .venv/bin/torchrun --nproc-per-node "$ranks" --master-port "$port" "${command[@]}" ;;
    deepspeed) .venv/bin/deepspeed --quiet --num_gpus "$ranks" --no_local_rank --master_port "$port" "${command[@]}" ;;
    accelerate)
        .venv/bin/accelerate launch --use_deepspeed --num_processes "$ranks" --main_process_port "$port" "${command[@]}"
        ;;
    elastic) run_nodes ;;
    *) echo "--launcher takes torchrun, deepspeed, accelerate or elastic, got $launcher" >&2 && exit 2 ;;
esac

folder=$(dirname "$out")
finished=("$folder"/*/losses.jsonl)
.venv/bin/python examples/pretrain/picture.py "${finished[@]%/losses.jsonl}" --out "$folder/losses.png"
