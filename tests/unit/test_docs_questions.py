"""Questions of a new user are answered in two clicks: home page, page of questions, section of the answer."""

from __future__ import annotations

import re

import pytest
from markdown.extensions.toc import slugify

from tests.support import ROOT

DOCS = ROOT / "docs"

# Question, page, heading of the section that answers it, and words of the answer that the section holds.
QUESTIONS = (
    ("How do I install it, with CUDA?", "quickstart", "Install and run on GPUs", 'pip install ".[train]"'),
    ("Can I try it without a GPU?", "quickstart", "Train on CPUs in one command", "bash examples/quickstart.sh"),
    ("Has it run on real GPUs?", "limits", "Not tried yet", "H200"),
    ("Does it work with my model?", "support", "Models", "| Llama | tested |"),
    ("Does it work with my trainer?", "support-loops", "Every loop and trainer", "TRL SFTTrainer"),
    ("What do I change in my script?", "loops", "What to add to your script", "`ds_hetero.register()`"),
    ("How do I get from a plan to a running job?", "cli", "plan", "`--out job/`"),
    (
        "Does my global batch change?",
        "loops",
        "How many ranks share a sequence",
        "`gradient_accumulation_steps`",
    ),
    (
        "Must versions, CUDA and drivers be equal on all machines?",
        "failures",
        "Settings that must be equal on all ranks",
        "torch's CUDA release",
    ),
    ("Can I use it with FSDP, tensor parallelism or experts?", "limits", "Not supported", "**FSDP**"),
    ("Are the results the same as on one GPU?", "loops", "What stays exact", "equal those of one process"),
    ("Which sequence length do I set?", "quickstart", "Let ds_hetero choose the schedule", "your longest sequence"),
    ("Does my job fit into memory?", "before-you-buy", "Will it fit?", "ds-hetero fit --gpus"),
    ("What do I do when a GPU runs out of memory?", "failures", "Out of memory", "`ds-hetero fit`"),
    (
        "Is my network fast enough, and should I leave a GPU out?",
        "before-you-buy",
        "A slow network or a slow GPU",
        "`leave out`",
    ),
    ("Can every GPU have its own batch size?", "unequal-batches", "Set a batch size for every GPU", '"batch": [6, 2]'),
    ("Can I train LoRA or QLoRA?", "adapters", "LoRA and QLoRA by ZeRO stage", "| LoRA |"),
    ("How do I start a job on several machines?", "launch", "Write the launch scripts", "ds-hetero launch-files"),
    ("Does it run in Docker?", "launch", "In a container", "`--shm-size`"),
    ("Does it run on Windows or macOS?", "limits", "Operating systems", "Linux"),
    ("How do I resume from a checkpoint?", "checkpoints", "Resume the HF Trainer", "resume_from_checkpoint"),
    (
        "Can I evaluate sequences that fit on no single GPU?",
        "evaluation",
        "Evaluate long sequences over all ranks",
        '"sharded"',
    ),
    (
        "Can I see the time of every GPU in W&B or TensorBoard?",
        "running",
        "Time per rank in W&B, TensorBoard or CSV",
        "DeepSpeed's monitor",
    ),
    ("What do I do when a job hangs?", "dead-ranks", "What the message says", "StepError"),
)


def _links(text: str) -> list[str]:
    return re.findall(r"\]\(([\w./-]+\.md(?:#[\w-]+)?)\)", text)


def _section(page: str, heading: str) -> str:
    """Return the text below a heading, up to the next one of its level."""
    text = re.sub(
        r"^( *```.*?^ *```)$", lambda m: m[1].replace("\n#", "\n #"), (DOCS / page).read_text(), flags=re.M | re.S
    )
    found = re.search(rf"^(#+) {re.escape(heading)}\n", text, re.MULTILINE)
    assert found, f"docs/{page} has no heading {heading!r}"
    level = len(found[1])
    return re.split(rf"^#{{1,{level}}} ", text[found.end() :], maxsplit=1, flags=re.MULTILINE)[0]


def test_the_home_page_links_to_the_questions():
    assert "questions.md" in _links((DOCS / "index.md").read_text())


def test_the_page_has_these_questions():
    headings = re.findall(r"^## (.+)$", (DOCS / "questions.md").read_text(), re.MULTILINE)
    assert headings == [question for question, *_ in QUESTIONS]
    assert len(headings) == 24


@pytest.mark.parametrize(
    ("question", "page", "heading", "says"), QUESTIONS, ids=[question for question, *_ in QUESTIONS]
)
def test_the_second_click_leads_to_the_section_that_answers(question, page, heading, says):
    answer = _section("questions.md", question)
    assert len(answer.split("](")[0].split()) >= 3, "the page of questions answers in short before it links"
    assert f"{page}.md#{slugify(heading, '-')}" in _links(answer)
    assert says in _section(f"{page}.md", heading)
