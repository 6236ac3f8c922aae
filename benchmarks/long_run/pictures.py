"""Pictures of the long run, light and dark: losses, learning rate, evaluation, tokens per node, speed and events.

    python -m benchmarks.long_run.pictures

Reads `benchmarks/results/long_run_fp32.json` and `long_run_soak.json`, which ``python -m benchmarks.long_run`` and
``python -m benchmarks.long_run.soak`` measure, and writes `docs/images/long-run-<theme>.svg` and
`docs/images/soak-<theme>.svg`; what is not measured yet is not drawn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.measure.results import FOLDER

THEMES = {
    "light": {"text": "#24292f", "grey": "#6e7781", "line": "#d0d7de"},
    "dark": {"text": "#e6edf3", "grey": "#8b949e", "line": "#30363d"},
}
COLOURS = {
    "light": ("#3f51b5", "#c2410c", "#047857", "#9333ea"),
    "dark": ("#8c9eff", "#fb923c", "#34d399", "#d8b4fe"),
}
PICTURES = FOLDER.parents[1] / "docs" / "images"
_SMOOTH = 30  # steps of a mean, where single steps hide the course
_NAMES = {"worker": "killed", "notice": "leaves", "join": "back", "resume": "resume", "speed": "speeds"}


def path_of(name: str, theme: str) -> Path:
    """File of a picture, one of `DRAWINGS`, in a theme, "light" or "dark"."""
    return PICTURES / f"{name}-{theme}.svg"


def draw_run(result: dict[str, Any], theme: str, path: Path) -> None:
    """Write the picture of the run of one theme."""
    figure, panels = _figure(5, 9.6, theme)
    curves, colours = result["curves"], COLOURS[theme]
    losses, differences, rates, tokens, seconds = panels

    _draw_losses(losses, curves, theme)
    _title(losses, f"Loss, mean of {_SMOOTH} steps", theme, pad=26)  # names of events are below

    runs = {"rounded": "one process, sums in another order", "last_bit": "one process, last bits moved"}
    for (part, name), colour in zip({**runs, "ranks": "four ranks"}.items(), (*colours[1:3], colours[0]), strict=True):
        differences.plot(_highest(curves[part]["difference"]), color=colour, linewidth=1.2, label=name)
    differences.set_yscale("log")
    _title(differences, f"Relative difference of the loss from one process, largest of {_SMOOTH} steps", theme)

    rates.plot(curves["lr"], color=colours[0], linewidth=1.5)
    _title(rates, "Learning rate, equal in both runs", theme)

    totals = [sum(of_step) for of_step in zip(*curves["tokens_by_node"].values(), strict=True)]
    for colour, (node, of_node) in zip(colours, curves["tokens_by_node"].items(), strict=True):
        shares = [count / total for count, total in zip(of_node, totals, strict=True)]
        tokens.plot(_smooth(shares), color=colour, linewidth=1.2, label=node)
    _title(tokens, "Share of tokens by node", theme)

    rates_of_tokens = [total / step_s for total, step_s in zip(totals, curves["seconds"], strict=True)]
    seconds.plot(_smooth(rates_of_tokens), color=colours[0], linewidth=1.2)
    _title(seconds, "Tokens a second, emulated speeds", theme)
    seconds.set_xlabel("step", color=THEMES[theme]["text"])

    for panel in panels:
        _mark_events(panel, result, theme)
    _name_events(losses, result, theme)
    tokens.set_ylim(0, 0.7)
    for panel, place in ((losses, "upper right"), (differences, "lower right"), (tokens, "upper right")):
        _legend(panel, theme, place)
    _save(figure, path)


def draw_losses(result: dict[str, Any], theme: str, path: Path) -> None:
    """Write the picture of the losses alone, for the README."""
    figure, (losses,) = _figure(1, 3.0, theme)
    _draw_losses(losses, result["curves"], theme)
    _title(losses, f"Loss, mean of {_SMOOTH} steps, and evaluation loss", theme, pad=26)
    losses.set_xlabel("step", color=THEMES[theme]["text"])
    _mark_events(losses, result, theme)
    _name_events(losses, result, theme)
    _legend(losses, theme, "upper right")
    _save(figure, path)


def _draw_losses(panel: Any, curves: dict[str, Any], theme: str) -> None:
    """Draw the losses of both runs, and their evaluations."""
    colours = COLOURS[theme]
    panel.plot(_smooth(curves["alone"]["loss"]), color=colours[1], linewidth=2.4, label="one process")
    panel.plot(_smooth(curves["ranks"]["loss"]), color=colours[0], linewidth=1, label="four unequal ranks")
    for part, mark, colour in (("ranks", "o", colours[0]), ("alone", "x", colours[1])):
        steps = [int(step) for step in curves[part]["evaluation"]]
        evaluation = list(curves[part]["evaluation"].values())
        panel.plot(steps, evaluation, mark, color=colour, markersize=4, fillstyle="none", label="evaluation")


def _mark_events(panel: Any, result: dict[str, Any], theme: str) -> None:
    for step, _ in _marks(result):
        panel.axvline(step, color=THEMES[theme]["grey"], linestyle=":", linewidth=0.8)


def _name_events(panel: Any, result: dict[str, Any], theme: str) -> None:
    """Write the names of events above a panel."""
    for step, text in _marks(result):
        panel.text(step, 1.02, text, transform=panel.get_xaxis_transform(), **_small(theme, rotation=30))


def _marks(result: dict[str, Any]) -> list[tuple[int, str]]:
    """Return step and name of every event."""
    events = [(event["step"], _NAMES[event["kind"]]) for event in result["events"]]
    return sorted([*events, *((change["step"], _NAMES["speed"]) for change in result["adaptations"])])


def draw_soak(result: dict[str, Any], theme: str, path: Path) -> None:
    """Write the picture of the soak of one theme."""
    figure, panels = _figure(3, 6.0, theme)
    memory, open_files, seconds = panels
    for rank in range(result["ranks"]):
        colour = COLOURS[theme][rank]
        resident = result["series"][f"rank {rank} resident_bytes"]
        steps = [result["read_every"] * (number + 1) for number in range(len(resident))]
        memory.plot(steps, [value / 2**20 for value in resident], color=colour, linewidth=1.2, label=f"rank {rank}")
        of_rank = result["series"][f"rank {rank} open_files"]
        open_files.plot(steps, of_rank, color=colour, linewidth=1.2, label=f"rank {rank}, open files")
        threads = result["series"][f"rank {rank} threads"]
        open_files.plot(steps, threads, color=colour, linewidth=1.2, linestyle="--", label=f"rank {rank}, threads")
    step_s = result["series"]["seconds a step"]
    steps = [result["read_every"] * (number + 1) for number in range(len(step_s))]
    seconds.plot(steps, step_s, color=COLOURS[theme][0], linewidth=1.2)
    _title(memory, "Resident memory, MiB", theme)
    _title(open_files, "Open files and threads", theme)
    _title(seconds, "Seconds a step", theme)
    seconds.set_xlabel("step", color=THEMES[theme]["text"])
    for panel in (memory, open_files):
        panel.legend(frameon=False, labelcolor=THEMES[theme]["text"], fontsize=8, ncols=3, loc="upper right")
    for panel in panels:
        panel.set_ylim(bottom=0)
    _save(figure, path)


def _figure(num_panels: int, height: float, theme: str) -> tuple[Any, Sequence[Any]]:
    """Return a figure of panels above each other, which share their steps."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 9}):
        figure = Figure(figsize=(7.2, height), layout="constrained")
        panels = figure.subplots(num_panels, sharex=True, squeeze=False)[:, 0]
    for panel in panels:
        panel.tick_params(colors=THEMES[theme]["text"], length=0)
        panel.spines[:].set_visible(False)
        panel.grid(axis="y", color=THEMES[theme]["line"], linewidth=0.6)
        panel.set_facecolor("none")
    return figure, panels


def _title(panel: Any, text: str, theme: str, pad: float = 6.0) -> None:
    panel.set_title(text, loc="left", pad=pad, color=THEMES[theme]["text"])


def _legend(panel: Any, theme: str, place: str) -> None:
    panel.legend(frameon=False, labelcolor=THEMES[theme]["text"], fontsize=8, ncols=4, loc=place, handlelength=1.2)


def _small(theme: str, **more: Any) -> dict[str, Any]:
    return {"color": THEMES[theme]["text"], "fontsize": 8, "ha": "left", "va": "bottom", **more}


def _smooth(values: Sequence[float]) -> list[float]:
    """Return the mean of the last `_SMOOTH` values at every step."""
    return [fmean(values[max(0, step - _SMOOTH) : step]) for step in range(1, len(values) + 1)]


def _highest(values: Sequence[float]) -> list[float]:
    """Return the largest of the last `_SMOOTH` values at every step; a logarithm needs a positive one."""
    return [max(1e-9, *values[max(0, step - _SMOOTH) : step]) for step in range(1, len(values) + 1)]


def _save(figure: Any, path: Path) -> None:
    """Write a figure; text stays text, and ids do not depend on chance, so that the file changes with figures alone."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "ds_hetero"}):
        figure.savefig(path, transparent=True, metadata={"Date": None})


def main() -> None:
    """The command."""
    for name, (result, draw) in DRAWINGS.items():
        if result.exists():
            for theme in THEMES:
                draw(json.loads(result.read_text()), theme, path_of(name, theme))
                print(f"written to {path_of(name, theme)}")


DRAWINGS = {
    "long-run": (FOLDER / "long_run_fp32.json", draw_run),
    "long-run-losses": (FOLDER / "long_run_fp32.json", draw_losses),
    "soak": (FOLDER / "long_run_soak.json", draw_soak),
}


if __name__ == "__main__":
    main()
