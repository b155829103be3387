from __future__ import annotations

from pathlib import Path

import pytest
from keeper_harness import Stage


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(folder=tmp_path)
