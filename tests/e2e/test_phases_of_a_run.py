"""A real run with steps of many lengths, evaluations and a slow checkpoint: nothing is found, and the late rank is said to write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import launch, script, torchrun, watchdog

pytestmark = pytest.mark.e2e


@pytest.mark.slow
def test_a_checkpoint_that_takes_its_time_is_no_hang(tmp_path: Path) -> None:
    ended = launch(tmp_path, [*watchdog("--job", "phases"), *torchrun(*script("phases.py"))])
    assert (ended.code, ended.incidents) == (0, []), ended.err
    events = [json.loads(line) for line in (ended.run_dir / "events.jsonl").read_text().splitlines()]
    late = [one for one in events if one["kind"] == "rank.late"]
    assert [one["rank"] for one in late] == [0]
    assert "rank 1 waits for rank 0: it is not in a collective: it writes a checkpoint, in File" in late[0]["text"]
    assert "in save_checkpoint" in late[0]["text"]
