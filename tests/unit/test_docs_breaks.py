"""Hook of the site: names in tables may break, options of commands may not, and tags stay as they are."""

from __future__ import annotations

import importlib.util

from tests.support import ROOT


def _with_breaks(html: str) -> str:
    spec = importlib.util.spec_from_file_location("breaks_hook", ROOT / ".ci" / "breaks.py")
    assert spec is not None and spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    changed: str = hook.on_page_content(html)
    return changed


def test_an_option_stays_in_one_piece() -> None:
    html = '<pre><code>fit<span class="w w-x"> </span>--tiled-mlp --lr -1</code></pre> a-b'
    whole = '<span class="unbroken">--tiled-mlp</span> <span class="unbroken">--lr</span> -1'
    assert _with_breaks(html) == html.replace("--tiled-mlp --lr -1", whole)


def test_names_in_tables_break_at_their_parts() -> None:
    html = '<table><td><a href="x.y"><code>elastic.min_ranks</code></a> a.b <code>ForTraining</code></td></table>'
    assert _with_breaks(html) == html.replace("elastic.min_", "elastic.<wbr>min_<wbr>").replace("ForT", "For<wbr>T")
