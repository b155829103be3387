"""The tests of the hooks import their helpers from this folder, and each runs in a folder of its own with a short name."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tw") as made:
        monkeypatch.chdir(made)
        yield Path(made)
