"""Make one HTML page of all result files: tables and charts, each with the command that makes it.

    python -m benchmarks.report [--results FOLDER] [--out FILE]

The page needs no other files; it is made like that of ``ds-hetero report``. Sections without a result file are left
out. The "quick" result of a file is shown only if it has no full one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure.results import FOLDER
from ds_hetero.reporting.html import Markup, Page, heading, html_table, paragraph


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of the result files")
    parser.add_argument("--out", type=Path, help="the page; default: report.html in that folder")
    options = parser.parse_args(arguments)
    out = options.out or options.results / "report.html"
    out.write_text(page(options.results), encoding="utf-8")
    print(f"written to {out}")


def page(folder: Path) -> str:
    """Return the page of the result files in ``folder``."""
    html_page, shown = Page("ds_hetero: measurements"), set()
    for name, title, make in _SECTIONS:
        path = next((p for p in (folder / f"{name}.json", folder / f"{name}_quick.json") if p.is_file()), None)
        if path is not None:
            result = json.loads(path.read_text(encoding="utf-8"))
            shown.add(path)
            html_page.section(title, _origin(result, path), *make(html_page, result))
    others = ", ".join(path.name for path in sorted(folder.glob("*.json")) if path not in shown)
    if others:
        html_page.section("Not shown", others)
    return html_page.render()


def _origin(result: dict[str, Any], path: Path) -> Markup:
    """Return the line that says when and by which command a result was made."""
    machine = result.get("machine", {})
    where = ", ".join(
        f"{key} {machine[key]}" for key in ("cpu", "gpu", "cores", "torch", "deepspeed") if key in machine
    )
    emulated = ["Emulated unequal ranks."] if result.get("emulated") else []
    command = result.get("command", "")
    when = f", {result['started']}" if "started" in result else ""
    return paragraph(*emulated, f"{command}{when}", where, path.name)


def _lines_chart(
    html_page: Page, label: str, x: Sequence[Any], x_name: str, series: Mapping[str, Sequence[float]], dashed: str = ""
) -> Markup:
    """Return a chart with a line per entry of ``series``; the entry named ``dashed`` is a bound."""
    drawn = [{"name": name, "values": list(values), "dashed": name == dashed} for name, values in series.items()]
    return html_page.chart("lines", label, {"x": list(x), "xName": x_name, "series": drawn})


def _lines(texts: Iterable[str]) -> Markup:
    """Return a paragraph with all lines of the texts."""
    return paragraph(*(line for text in texts for line in text.splitlines()))


# --- the lab ----------------------------------------------------------------------------------------


def _ring(html_page: Page, result: dict[str, Any]) -> Iterable[Markup]:
    """Yield the section of the ring in the lab."""
    rows = result["rows"]
    strategies = list(dict.fromkeys(row["strategy"] for row in rows))
    yield _lines(speeds["text"].splitlines()[0] for speeds in result["emulation"])
    for scope, tokens in dict.fromkeys((row["scope"], row["tokens"]) for row in rows):
        rows_of_case = [row for row in rows if (row["scope"], row["tokens"]) == (scope, tokens)]
        fractions = sorted({row["slow_fraction"] for row in rows_of_case})
        row_of = {(row["slow_fraction"], row["strategy"]): row for row in rows_of_case}
        speeds = [f"{fraction:.0%}" for fraction in fractions]
        gains = {name: [row_of[fraction, name]["speedup"] for fraction in fractions] for name in strategies}
        gains["bound"] = [row_of[fraction, strategies[0]]["bound_speedup"] for fraction in fractions]
        shares = {
            name: [row_of[fraction, name]["efficiency_against_bound"] for fraction in fractions] for name in strategies
        }
        yield heading(f"{tokens} tokens, {scope}")
        yield _lines_chart(html_page, "Speed-up over even shares", speeds, "speed of the second rank", gains, "bound")
        yield _lines_chart(html_page, "Share of the bound", speeds, "speed of the second rank", shares)
        yield html_table(
            ("second rank at", *strategies, "bound"),
            (
                (
                    f"{fraction:.0%}",
                    *(
                        f"{row_of[fraction, n]['speedup']:.2f}x, {row_of[fraction, n]['efficiency_against_bound']:.0%}"
                        for n in strategies
                    ),
                    f"{row_of[fraction, strategies[0]]['bound_speedup']:.2f}x",
                )
                for fraction in fractions
            ),
        )
    published = result["published"]
    yield paragraph(f"Published: {published['source']}; best speed-up {published['best_speedup']}x.")


def _mesh(html_page: Page, result: dict[str, Any]) -> Iterable[Markup]:
    """Yield the section of USP meshes in the lab."""
    yield _lines(emulation["text"] for emulation in result["emulation"])
    rows = result["rows"]
    for scope, speeds in dict.fromkeys((row["scope"], tuple(row["speeds"])) for row in rows):
        rows_of_case = [row for row in rows if (row["scope"], tuple(row["speeds"])) == (scope, speeds)]
        ratio = ":".join(f"{speed:g}" for speed in speeds)
        longest = [row for row in rows_of_case if row["tokens"] == max(r["tokens"] for r in rows_of_case)]
        rates = [row["tokens_per_s"] for row in longest] + [longest[0]["tokens"] / longest[0]["bound_s"]]
        series = [{"name": "tokens/s", "values": rates}]
        data = {"rows": [*(row["contender"] for row in longest), "bound"], "unit": "", "series": series}
        yield heading(f"{scope}, speeds {ratio}")
        yield html_page.chart("bars", f"Tokens per second at {longest[0]['tokens']} tokens", data, 80 + 34 * len(rates))
        yield html_table(
            ("contender", "tokens", "tokens/s", "over best uniform", "of the bound", "rounds", "spread"),
            (
                (
                    *(row["contender"], row["tokens"], f"{row['tokens_per_s']:,.0f}"),
                    *(f"{row['over_best_uniform']:.2f}x", f"{row['efficiency_against_bound']:.0%}"),
                    *(row["rounds"], f"{row['spread']:.0%}"),
                )
                for row in rows_of_case
            ),
        )


def _growth(html_page: Page, result: dict[str, Any]) -> Iterable[Markup]:
    """Yield the section of planner and training at several sizes."""
    yield _lines(f"{len(emulation['speeds'])} ranks: {emulation['text']}" for emulation in result["emulation"])
    rows = result["rows"]
    lengths = sorted({row["tokens"] for row in rows})
    for key, label in (
        ("seconds", "Seconds per layer, both passes, by tokens"),
        ("between_nodes_bytes_per_token", "Bytes between nodes per token, by tokens"),
    ):
        of = {(row["contender"], row["ranks"], row["tokens"]): row[key] for row in rows}
        series = {
            f"{contender}, {ranks} ranks": [of.get((contender, ranks, tokens)) for tokens in lengths]
            for contender, ranks in dict.fromkeys((row["contender"], row["ranks"]) for row in rows)
        }
        yield _lines_chart(html_page, label, lengths, "tokens", series)
    yield html_table(
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


def _replan(html_page: Page, result: dict[str, Any]) -> Iterable[Markup]:
    """Yield the section of re-planning."""
    yield _lines([result["found"]["text"]])
    rows, summary = result["rows"], result["summary"]
    rates = {"tokens/s": [row["tokens_per_s"] for row in rows]}
    switched = ", ".join(map(str, summary["switched_at"])) or "none"
    label = f"Tokens per second by step; slowed down at step 0, new schedules at: {switched}"
    yield _lines_chart(html_page, label, [row["step"] for row in rows], "step", rates)
    yield html_table(("", ""), summary.items())


# --- the others -------------------------------------------------------------------------------------


def _versus_stock(html_page: Page, result: dict[str, Any]) -> Iterable[Markup]:
    """Yield the section of uniform work beside stock engines."""
    yield html_table(
        ("peer", "scope", "ranks", "tokens", "link", "peer / ours", "95 % interval"),
        (
            (
                *(case["peer"], case["scope"], case["num_ranks"], case["tokens"], case["link"]),
                *(f"{case['ratio']:.3f}", "{:.2f} to {:.2f}".format(*case["interval"])),
            )
            for case in result["cases"]
        ),
    )


def _prediction(html_page: Page, result: dict[str, Any]) -> Iterable[Markup]:
    """Yield the section of predicted and measured steps."""
    yield _lines([f"Emulated: ranks of {', '.join(map(str, result['cores']))} cores; {result['link']}"])
    rows = [(row["name"], row["predicted_s"], row["measured_s"]) for row in result["rows"]]
    yield html_table(
        ("schedule", "predicted, s", "measured, s", "error"),
        (
            (name, f"{predicted_s:.2f}", f"{measured_s:.2f}", f"{predicted_s / measured_s - 1:+.1%}")
            for name, predicted_s, measured_s in sorted(rows, key=lambda row: row[2])
        ),
    )


def _zero(html_page: Page, result: dict[str, Any]) -> Iterable[Markup]:
    """Yield the section of weighted ZeRO with equal weights."""
    yield _lines([f"{result['ranks']} ranks, {result['tokens']} tokens; peer: stock ZeRO"])
    yield html_table(
        ("stage", "ours", "peer, s", "ours, s", "peer / ours", "95 % interval"),
        ((row["stage"], row["ours"], *_paired(row)) for row in result["rows"]),
    )


def _gradient_sync(html_page: Page, result: dict[str, Any]) -> Iterable[Markup]:
    """Yield the section of gradients that overlap the backward."""
    yield _lines(dict.fromkeys(job["link"] for job in result["jobs"]))
    yield html_table(
        ("degrees", "without overlap, s", "with, s", "ratio", "95 % interval"),
        ((job["degrees"], *_paired(job["overlap"])) for job in result["jobs"] if job["overlap"]),
    )


def _paired(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a paired comparison: seconds of peer and ours, their ratio, its interval."""
    interval = "{:.2f} to {:.2f}".format(*row["interval"])
    return f"{row['peer_s']:.3f}", f"{row['ours_s']:.3f}", f"{row['ratio']:.3f}", interval


def _memory(html_page: Page, result: dict[str, Any]) -> Iterable[Markup]:
    """Yield the section of peak memory of a layer."""
    rows = result["rows"]
    yield html_table(list(rows[0]), (list(row.values()) for row in rows))


def _hexiseq(html_page: Page, result: dict[str, Any]) -> Iterable[Markup]:
    """Yield the section of HexiSeq's simulations."""
    yield paragraph("Nothing is measured here: all of it follows from the cost model and the search.")
    yield html_table(
        ("simulation", "model", "context", "strongest baseline", "gain", "possible", "of the bound"),
        (
            (
                *(row[key] for key in ("simulation", "model", "context", "strongest")),
                *(f"{row['gain']:.2f}x", f"{row['possible_gain']:.2f}x", f"{row['of_bound']:.1%}"),
            )
            for row in result["simulations"]
        ),
    )


def _planner(html_page: Page, result: dict[str, Any]) -> Iterable[Markup]:
    """Yield the section of gaps to the exact optimum."""
    yield _lines(["Gap of the predicted time to the exact optimum, over random clusters."])
    rows = result["summary"]
    yield html_table(list(rows[0]), (list(map(_short, row.values())) for row in rows))


def _gpu(html_page: Page, result: dict[str, Any]) -> Iterable[Markup]:
    """Yield the section of one GPU, a table for each part."""
    for name, rows in result["tables"].items():
        if rows:
            yield heading(name)
            yield html_table(list(rows[0]), (list(map(_short, row.values())) for row in rows))


def _short(value: Any) -> str:
    """Return a value as text, floats with three digits."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


_Section = Callable[[Page, dict[str, Any]], Iterable[Markup]]
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
