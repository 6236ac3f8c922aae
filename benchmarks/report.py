"""One page of all result files: tables and plots, newest figures with the command that makes them.

    python -m benchmarks.report [--results FOLDER] [--out FILE]

The page is one HTML file with its plots in it. Sections without a result file are left out; a file's "quick" result is
shown only where there is no full one.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from benchmarks.measure.results import FOLDER

__all__ = ["main", "page"]

_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;margin:1em 0}td,th{border:1px solid #ccc;padding:.2em .6em;text-align:right}"
    "td:first-child,th:first-child{text-align:left}code{background:#f3f3f3;padding:0 .3em}img{max-width:100%}"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of the result files")
    parser.add_argument("--out", type=Path, help="the page; default: report.html in that folder")
    options = parser.parse_args(arguments)
    out = options.out or options.results / "report.html"
    out.write_text(page(options.results), encoding="utf-8")
    print(f"written to {out}")


def page(folder: Path) -> str:
    """The page of the result files in ``folder``."""
    sections, shown = [], set()
    for name, title, make in _SECTIONS:
        path = next((p for p in (folder / f"{name}.json", folder / f"{name}_quick.json") if p.is_file()), None)
        if path is not None:
            result = json.loads(path.read_text(encoding="utf-8"))
            shown.add(path)
            sections.append(f"<h2>{html.escape(title)}</h2>{_origin(result, path)}{''.join(make(result))}")
    others = ", ".join(path.name for path in sorted(folder.glob("*.json")) if path not in shown)
    return (
        f"<!doctype html><meta charset=utf-8><title>ds_hetero: measurements</title><style>{_STYLE}</style>"
        f"<h1>ds_hetero: measurements</h1>{''.join(sections)}"
        + (f"<p>Not shown: {html.escape(others)}</p>" if others else "")
    )


def _origin(result: dict[str, Any], path: Path) -> str:
    machine = result.get("machine", {})
    where = ", ".join(
        f"{key} {machine[key]}" for key in ("cpu", "gpu", "cores", "torch", "deepspeed") if key in machine
    )
    emulated = "<b>Emulated</b> unequal ranks. " if result.get("emulated") else ""
    when = f", {result['started']}" if "started" in result else ""
    command = f"<code>{html.escape(result['command'])}</code>" if "command" in result else ""
    return f"<p>{emulated}{command}{html.escape(when)}<br>{html.escape(where)}<br>{html.escape(path.name)}</p>"


def _table(headings: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    def cells(tag: str, values: Iterable[Any]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(value))}</{tag}>" for value in values) + "</tr>"

    return f"<table>{cells('th', headings)}{''.join(cells('td', row) for row in rows)}</table>"


def _plot(figure: Figure, alternative: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight")
    plt.close(figure)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{html.escape(alternative)}" src="data:image/svg+xml;base64,{data}">'


def _lines(texts: Iterable[str]) -> str:
    return "<p>" + "<br>".join(html.escape(line) for text in texts for line in text.splitlines()) + "</p>"


# --- the lab ----------------------------------------------------------------------------------------


def _ring(result: dict[str, Any]) -> Iterable[str]:
    rows = result["rows"]
    strategies = list(dict.fromkeys(row["strategy"] for row in rows))
    yield _lines(speeds["text"].splitlines()[0] for speeds in result["emulation"])
    for scope, tokens in dict.fromkeys((row["scope"], row["tokens"]) for row in rows):
        mine = [row for row in rows if (row["scope"], row["tokens"]) == (scope, tokens)]
        fractions = sorted({row["slow_fraction"] for row in mine})
        found = {(row["slow_fraction"], row["strategy"]): row for row in mine}
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.2))
        for name in strategies:
            of_name = [found[fraction, name] for fraction in fractions]
            axes[0].plot(fractions, [row["speedup"] for row in of_name], marker="o", label=name)
            axes[1].plot(fractions, [row["efficiency_against_bound"] for row in of_name], marker="o", label=name)
        axes[0].plot(fractions, [found[f, strategies[0]]["bound_speedup"] for f in fractions], "k--", label="bound")
        for axis, label in zip(axes, ("speed-up over even", "share of the bound"), strict=True):
            axis.set_xlabel("speed of the second rank")
            axis.set_ylabel(label)
            axis.set_ylim(bottom=0)
        axes[0].legend(fontsize=8)
        yield f"<h3>{tokens} tokens, {scope}</h3>" + _plot(figure, f"{tokens} tokens, {scope}")
        yield _table(
            ("second rank at", *strategies, "bound"),
            (
                (
                    f"{fraction:.0%}",
                    *(
                        f"{found[fraction, n]['speedup']:.2f}x, {found[fraction, n]['efficiency_against_bound']:.0%}"
                        for n in strategies
                    ),
                    f"{found[fraction, strategies[0]]['bound_speedup']:.2f}x",
                )
                for fraction in fractions
            ),
        )
    published = result["published"]
    yield f"<p>Published: {html.escape(published['source'])}; best speed-up {published['best_speedup']}x.</p>"


def _mesh(result: dict[str, Any]) -> Iterable[str]:
    yield _lines(emulation["text"] for emulation in result["emulation"])
    rows = result["rows"]
    for scope, speeds in dict.fromkeys((row["scope"], tuple(row["speeds"])) for row in rows):
        mine = [row for row in rows if (row["scope"], tuple(row["speeds"])) == (scope, speeds)]
        ratio = ":".join(f"{speed:g}" for speed in speeds)
        longest = [row for row in mine if row["tokens"] == max(r["tokens"] for r in mine)]
        figure, axis = plt.subplots(figsize=(8, 2.6))
        axis.barh([row["contender"] for row in longest][::-1], [row["tokens_per_s"] for row in longest][::-1])
        axis.axvline(longest[0]["tokens"] / longest[0]["bound_s"], color="k", linestyle="--", label="bound")
        axis.set_xlabel(f"tokens/s at {longest[0]['tokens']} tokens")
        axis.legend(fontsize=8)
        yield f"<h3>{scope}, speeds {ratio}</h3>" + _plot(figure, f"{scope}, speeds {ratio}")
        yield _table(
            ("contender", "tokens", "tokens/s", "over best uniform", "of the bound", "rounds", "spread"),
            (
                (
                    *(row["contender"], row["tokens"], f"{row['tokens_per_s']:,.0f}"),
                    *(f"{row['over_best_uniform']:.2f}x", f"{row['efficiency_against_bound']:.0%}"),
                    *(row["rounds"], f"{row['spread']:.0%}"),
                )
                for row in mine
            ),
        )


def _growth(result: dict[str, Any]) -> Iterable[str]:
    yield _lines(f"{len(emulation['speeds'])} ranks: {emulation['text']}" for emulation in result["emulation"])
    rows = result["rows"]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2))
    for contender, ranks in dict.fromkeys((row["contender"], row["ranks"]) for row in rows):
        mine = [row for row in rows if (row["contender"], row["ranks"]) == (contender, ranks)]
        tokens = [row["tokens"] for row in mine]
        axes[0].plot(tokens, [row["seconds"] for row in mine], marker="o", label=f"{contender}, {ranks} ranks")
        axes[1].plot(tokens, [row["between_nodes_bytes_per_token"] for row in mine], marker="o")
    for axis, label in zip(axes, ("s per layer, both passes", "bytes between nodes per token"), strict=True):
        axis.set_xlabel("tokens")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
    axes[0].legend(fontsize=7)
    yield _plot(figure, "time and traffic by tokens")
    yield _table(
        ("contender", "ranks", "tokens", "s", "tokens/s", "bytes sent per token", "between nodes"),
        (
            (
                *(row["contender"], row["ranks"], row["tokens"], f"{row['seconds']:.2f}"),
                *(f"{row[key]:,.0f}" for key in ("tokens_per_s", "payload_bytes_per_token")),
                f"{row['between_nodes_bytes_per_token']:,.0f}",
            )
            for row in rows
        ),
    )


def _replan(result: dict[str, Any]) -> Iterable[str]:
    yield _lines([result["found"]["text"]])
    rows, summary = result["rows"], result["summary"]
    figure, axis = plt.subplots(figsize=(8, 2.8))
    axis.plot([row["step"] for row in rows], [row["tokens_per_s"] for row in rows], marker=".")
    axis.axvline(0, color="r", linestyle=":", label="slowed down")
    for number, step in enumerate(summary["switched_at"]):
        axis.axvline(step, color="g", linestyle="--", label=None if number else "new schedule")
    axis.set_xlabel("step")
    axis.set_ylabel("tokens/s")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)
    yield _plot(figure, "tokens per second by step")
    yield _table(("", ""), summary.items())


# --- the others -------------------------------------------------------------------------------------


def _versus_stock(result: dict[str, Any]) -> Iterable[str]:
    yield _table(
        ("peer", "scope", "ranks", "tokens", "link", "peer / ours", "95 % interval"),
        (
            (
                *(case["peer"], case["scope"], case["num_ranks"], case["tokens"], case["link"]),
                *(f"{case['ratio']:.3f}", "{:.2f} to {:.2f}".format(*case["interval"])),
            )
            for case in result["cases"]
        ),
    )


def _prediction(result: dict[str, Any]) -> Iterable[str]:
    yield _lines([f"Emulated: ranks of {', '.join(map(str, result['cores']))} cores; {result['link']}"])
    rows = [(row["name"], row["predicted_s"], row["measured_s"]) for row in result["rows"]]
    yield _table(
        ("schedule", "predicted, s", "measured, s", "error"),
        (
            (name, f"{predicted_s:.2f}", f"{measured_s:.2f}", f"{predicted_s / measured_s - 1:+.1%}")
            for name, predicted_s, measured_s in sorted(rows, key=lambda row: row[2])
        ),
    )


def _zero(result: dict[str, Any]) -> Iterable[str]:
    yield _lines([f"{result['ranks']} ranks, {result['tokens']} tokens; peer: stock ZeRO"])
    yield _table(
        ("stage", "ours", "peer, s", "ours, s", "peer / ours", "95 % interval"),
        ((row["stage"], row["ours"], *_paired(row)) for row in result["rows"]),
    )


def _gradient_sync(result: dict[str, Any]) -> Iterable[str]:
    yield _lines(dict.fromkeys(job["link"] for job in result["jobs"]))
    yield _table(
        ("degrees", "without overlap, s", "with, s", "ratio", "95 % interval"),
        ((job["degrees"], *_paired(job["overlap"])) for job in result["jobs"] if job["overlap"]),
    )


def _paired(row: dict[str, Any]) -> tuple[str, ...]:
    interval = "{:.2f} to {:.2f}".format(*row["interval"])
    return f"{row['peer_s']:.3f}", f"{row['ours_s']:.3f}", f"{row['ratio']:.3f}", interval


def _memory(result: dict[str, Any]) -> Iterable[str]:
    rows = result["rows"]
    yield _table(rows[0], (row.values() for row in rows))


def _hexiseq(result: dict[str, Any]) -> Iterable[str]:
    yield "<p>Nothing is measured here: all of it follows from the cost model and the search.</p>"
    yield _table(
        ("simulation", "model", "context", "strongest baseline", "gain", "possible", "of the bound"),
        (
            (
                *(row[key] for key in ("simulation", "model", "context", "strongest")),
                *(f"{row['gain']:.2f}x", f"{row['possible_gain']:.2f}x", f"{row['of_bound']:.1%}"),
            )
            for row in result["simulations"]
        ),
    )


def _planner(result: dict[str, Any]) -> Iterable[str]:
    yield _lines(["Gap of the predicted time to the exact optimum, over random clusters."])
    rows = result["summary"]
    yield _table(rows[0], (map(_short, row.values()) for row in rows))


def _gpu(result: dict[str, Any]) -> Iterable[str]:
    for name, rows in result["tables"].items():
        if rows:
            yield f"<h3>{html.escape(name)}</h3>" + _table(rows[0], (map(_short, row.values()) for row in rows))


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


_Section = Callable[[dict[str, Any]], Iterable[str]]
_SECTIONS: tuple[tuple[str, str, _Section], ...] = (
    ("lab_ring", "Two ranks, the second slowed down", _ring),
    ("lab_mesh", "Four ranks in two unequal nodes", _mesh),
    ("lab_mesh_equal", "Four equal ranks in two nodes", _mesh),
    ("lab_growth", "Growth with ranks and tokens", _growth),
    ("lab_replan", "A rank that becomes slow in the middle of a run", _replan),
    ("versus_stock", "Equal ranks: peer / ours", _versus_stock),
    ("versus_stock_1k", "Equal ranks, short sequences: peer / ours", _versus_stock),
    ("memory", "Equal ranks: peak memory", _memory),
    ("prediction_loopback", "Predicted and measured step time, loopback", _prediction),
    ("prediction_1gbit", "Predicted and measured step time, 1 Gbit/s", _prediction),
    ("zero", "ZeRO by weight against stock", _zero),
    ("gradient_sync", "Gradient synchronization of unequal replicas", _gradient_sync),
    ("hexiseq", "HexiSeq's simulations", _hexiseq),
    ("planner_exact_published", "Search against the exact optimum", _planner),
    ("gpu", "One GPU", _gpu),
)


if __name__ == "__main__":
    main()
