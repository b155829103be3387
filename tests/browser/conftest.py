"""One Chromium for all tests of this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))


@pytest.fixture(scope="session")
def chromium() -> Iterator[object]:
    from browsing import browser

    with browser() as made:
        yield made


@pytest.fixture
def window(chromium: object) -> object:
    from browsing import Browser

    assert isinstance(chromium, Browser)
    chromium.dark(False)
    chromium.size(1200, 900)
    chromium.errors()
    return chromium
