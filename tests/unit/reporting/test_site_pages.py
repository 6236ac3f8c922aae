"""Every page of the built site fits a phone: only tables, code and wide pictures move sideways. Budget: 120 s."""

from __future__ import annotations

from typing import Any

import pytest

from tests.page_pictures import SITE, look_at, served

pytestmark = pytest.mark.slow

PHONE = 390  # pixels


def test_no_page_is_wider_than_a_phone(browser: Any) -> None:
    pages = sorted(str(path.parent.relative_to(SITE)) for path in SITE.rglob("index.html"))
    if not pages:
        pytest.skip("no site: .venv/bin/mkdocs build --strict makes it in .cache/site")
    assert len(pages) >= 60
    wide = {}
    with served(SITE) as site:
        for name in pages:
            width = look_at(browser, f"{site}{name}/", PHONE, "light").width
            if width > PHONE:
                wide[name] = width
    assert wide == {}
