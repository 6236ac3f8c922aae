"""Take pictures of pages of the site and of a plan's page, at 1280 and 390 pixels, light and dark.

    .venv/bin/mkdocs build --strict
    python -m tests.page_pictures FOLDER [--pages quickstart ...] [--plan plan.html]

The site is that of ``mkdocs build``, in `.cache/site`. Every page is also measured: the command prints the pages that
are wider than the window, and blocks of code of which a part is hidden, and ends with 1 if a page is too wide. It needs
a Chromium, see `.ci/browser`.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import ROOT

SITE = ROOT / ".cache" / "site"
WIDTHS, SCHEMES = (1280, 390), ("light", "dark")
PAGES = (
    "",
    "quickstart",
    "questions",
    "support",
    "unequal-batches",
    "recipes",
    "your-rig",
    "failures",
    "measured",
    "configuration",
)
"""Pages that are taken without --pages: those that new users open first, and those with the widest tables."""

# The width of the page, and the first words of every block whose text is cut off at the right edge.
_MEASURE = """() => ({
    width: document.documentElement.scrollWidth,
    cut: [...document.querySelectorAll("pre > code, pre")]
        .filter((block) => block.scrollWidth > block.clientWidth + 1 && block.clientWidth > 0)
        .map((block) => block.textContent.trim().slice(0, 60)),
})"""


class Measured(NamedTuple):
    """What a page looks like in a window."""

    width: int  # pixels; more than those of the window if the page scrolls sideways
    cut: list[str]  # beginnings of blocks of code that scroll sideways


class _Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves a folder without a line for every request."""

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine; yield its address."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@contextmanager
def opened_browser() -> Iterator[Any]:
    """Open a Chromium without a window. Raises `playwright.sync_api.Error`: there is none."""
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome")
    path = next((found for name in names if (found := shutil.which(name))), None)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def look_at(browser: Any, address: str, width: int, scheme: str, picture: Path | None = None) -> Measured:
    """Open a page in a window of this width and colours, measure it, and write a picture of all of it."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto(address)
    measured = Measured(**page.evaluate(_MEASURE))
    if picture is not None:
        page.screenshot(path=picture, full_page=True)
    page.close()
    return measured


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.page_pictures", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pages", nargs="*", default=PAGES, help="pages of the site; none: only --plan")
    parser.add_argument("--plan", type=Path, nargs="*", default=[], help="pages that ds-hetero report wrote")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    num_wide = 0
    with served(SITE) as site, opened_browser() as browser:
        addresses = {page or "index": f"{site}{page}/" if page else site for page in options.pages}
        addresses |= {path.stem: path.resolve().as_uri() for path in options.plan}
        for name, address in addresses.items():
            for width in WIDTHS:
                for scheme in SCHEMES:
                    picture = options.folder / f"{name.replace('/', '-')}-{width}-{scheme}.png"
                    measured = look_at(browser, address, width, scheme, picture)
                    if measured.width > width:
                        num_wide += 1
                        print(f"{name}: {measured.width} pixels wide in a window of {width}")
                if width == WIDTHS[0]:
                    for start in measured.cut:
                        print(f"{name}: scrolls sideways at {width}: {start!r}")
    print(f"pictures are in {options.folder}")
    return 1 if num_wide else 0


if __name__ == "__main__":
    sys.exit(main())
