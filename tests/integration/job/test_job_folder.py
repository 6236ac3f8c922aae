"""A folder that ``ds-hetero plan --out`` writes starts on four ranks as it is, with its README's lines in train.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ds_hetero.cli import main
from tests.integration.tiny import llama
from tests.support import ROOT, free_port

pytestmark = [pytest.mark.slow, pytest.mark.alone]  # ranks that import everything, under a launcher

SAMPLES = 8  # of an optimizer step
TOKENS = 64
STEPS = 3
BF16_TOLERANCE = 2e-2  # relative, of gradient norms
SCRIPT = """
import deepspeed.ops
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from transformers import AutoConfig, AutoModelForCausalLM

{imports}

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # an extension for CPUs, compiled for minutes
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config="ds_config.json"))
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("model"))
{recomputation}
rows = torch.randint(0, model.config.vocab_size, ({rows}, {tokens}), generator=torch.Generator().manual_seed(1))
data = [{{"input_ids": row, "labels": row}} for row in rows]
loader = torch.utils.data.DataLoader(data, batch_size={batch_size})
engine, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4), loader)
for batch in loader:
    with accelerator.accumulate(engine):
        accelerator.backward(engine(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        accelerator.print("gradient norm", float(engine.get_global_grad_norm()))
"""


@pytest.mark.sweep(keep=1)
@pytest.mark.parametrize("kind", ["sequence", "pipelines", "batch"])
def test_a_folder_starts_without_a_change_and_trains_as_one_process(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    words = ["plan", "--gpus", "5090x2,3090x2", "--model", "llama-3.2-1b", "--seq-len", "8K"]
    words += ["--micro-batches", str(SAMPLES), "--parallel", kind, "--out", str(folder)]
    with pytest.raises(SystemExit, match="0"):
        main(words)
    # The plan's layers and heads, in a size for CPUs. Tokens of a schedule are shares, which hold for any length.
    llama(num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=2).config.save_pretrained(
        folder / "model"
    )

    readme = (folder / "README.md").read_text()
    code = _only(r"```python\n(.*?)```", readme).splitlines()
    _write_script(folder, code, batch_size=int(_only(r"batch size of the loader is (\d+)", readme)))
    norms = _norms(["bash", "torchrun.sh", "0"], folder)

    config = json.loads((folder / "ds_config.json").read_text())
    alone = {key: config[key] for key in ("gradient_clipping", "bf16", "zero_optimization")}
    (folder / "ds_config.json").write_text(json.dumps({**alone, "train_micro_batch_size_per_gpu": SAMPLES}))
    _write_script(folder, code, batch_size=SAMPLES)
    torchrun = ["torchrun", "--nproc-per-node", "1", "--master-port", str(free_port()), "train.py"]
    assert norms == pytest.approx(_norms(torchrun, folder), rel=BF16_TOLERANCE)


def _only(pattern: str, text: str) -> str:
    (found,) = re.findall(pattern, text, re.DOTALL)
    return str(found)


def _write_script(folder: Path, code: list[str], *, batch_size: int) -> None:
    """Write train.py with the lines of the README: two of ds_hetero, then recomputation if the plan has it."""
    script = SCRIPT.format(
        imports="\n".join(code[:2]),
        recomputation="\n".join(code[2:]),
        rows=SAMPLES * STEPS,
        tokens=TOKENS,
        batch_size=batch_size,
    )
    (folder / "train.py").write_text(script)


def _norms(command: list[str], folder: Path) -> list[float]:
    """Return the gradient norm of every step, as the job prints it."""
    environment = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
        "ACCELERATE_USE_CPU": "false",  # accelerate leaves DeepSpeed alone where it is told to use the CPU
        "OMP_NUM_THREADS": "1",
    }
    ended = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
    norms = [float(norm) for norm in re.findall(r"gradient norm (\S+)", ended.stdout)]
    assert len(norms) == STEPS, ended.stdout[-3000:]
    return norms
