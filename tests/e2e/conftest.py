"""End-to-end tests import their helpers from this folder, and have time: each starts several launches, on a machine that may be busy."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
TIMEOUT_S = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S), append=False)


@pytest.fixture(autouse=True)
def out_of_sight_of_what_trains_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs: with one in sight some of Trainer's releases cannot load their own `optimizer.pt` ("cpu:0")."""
    if os.environ.get("E2E_DEVICE") != "cuda":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
