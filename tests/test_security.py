"""Every line of the threat model names a test that is there."""

from __future__ import annotations

import re
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent


def test_every_threat_has_its_test() -> None:
    rows = [line for line in (REPO / "SECURITY.md").read_text().splitlines() if line.startswith("| ") and not line.startswith("| threat")]
    assert len(rows) >= 10
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", row)
        assert named, row
        for path, test in named:
            assert f"def {test}" in (REPO / path).read_text(), (path, test)
