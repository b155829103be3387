"""A daemon with a page, whose jobs are told to it over real gRPC streams."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet_harness import Fleet


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    root = Path(tempfile.mkdtemp(prefix="tw"))
    with Fleet(root) as made:
        yield made
    shutil.rmtree(root, ignore_errors=True)
