"""The place of one test, and the end of everything that ran in it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_harness import Place


@pytest.fixture
def place() -> Iterator[Place]:
    root = Path(tempfile.mkdtemp(prefix="tw"))
    made = Place(root)
    yield made
    for close in reversed(made.closing):
        close()
    shutil.rmtree(root, ignore_errors=True)
