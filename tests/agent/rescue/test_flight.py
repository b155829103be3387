"""torch's flight recorder: what C++ has called is known by it, it is read as JSON only, and NCCL's is asked only where the device answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torch_watchdog_agent.hooks import collectives
from torch_watchdog_agent.hooks.collectives import calls_made, described
from torch_watchdog_agent.rescue import flight

# As torch 2.11's NCCL recorder writes it
NCCL = {
    "version": "2.10",
    "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
    "pg_status": {"0": {"last_enqueued_collective": "9", "last_started_collective": "9", "last_completed_collective": "8"}},
    "entries": [
        {"pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": 8, "is_p2p": False, "profiling_name": "nccl:_all_gather_base",
         "input_sizes": [[186]], "input_dtypes": ["Float"], "state": "completed"},
        {"pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": 9, "is_p2p": False, "profiling_name": "nccl:all_reduce",
         "input_sizes": [[32, 4]], "input_dtypes": ["BFloat16"], "state": "started"},
        {"pg_id": 0, "process_group": ["0", "default_pg"], "p2p_seq_id": 3, "is_p2p": True, "profiling_name": "nccl:send 0->1",
         "input_sizes": [[1]], "input_dtypes": ["Long"], "state": "scheduled"},
    ],
}  # fmt: skip


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """A torch whose NCCL has recorded; returns how it was asked."""
    asked: list[tuple[bool, bool]] = []

    def dump(include_collectives: bool, only_active: bool) -> bytes:
        asked.append((include_collectives, only_active))
        return json.dumps(NCCL).encode()

    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace(_dump_nccl_trace_json=dump))
    return asked


def test_the_newest_collective_of_a_group_and_how_far_it_came(nccl: list[Any]) -> None:
    found = flight.read(device_answers=lambda: True)
    assert nccl == [(True, False)]
    assert found.newest["0"].name == "all_reduce"
    assert found.lines == "  flight recorder, process group 0: all_reduce (started); 9 enqueued, 8 completed\n"


def test_a_device_that_does_not_answer_is_not_asked(nccl: list[Any]) -> None:
    """The recorder queries events with the interpreter's lock held: a driver that is stuck would take the whole process with it."""
    assert flight.read(device_answers=lambda: False) == flight.NOTHING
    assert nccl == []


def test_what_c_plus_plus_called_is_told_in_the_words_of_a_call_of_pythons(nccl: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_newest", {})
    group = SimpleNamespace(group_name="0", _get_sequence_number_for_group=lambda: 9)
    calls = collectives._made_on(group, flight.read(device_answers=lambda: True))
    assert calls is not None
    assert calls.newest == "all_reduce of (32, 4) bfloat16 (called by C++, as a backward's are)"
    assert calls.alike == described("all_reduce", [((128,), torch.bfloat16)]).alike


def test_a_torch_without_a_recorder_has_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace())
    assert flight.read(device_answers=lambda: True) == flight.NOTHING


@pytest.mark.skipif(not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"), reason="gloo records since torch 2.8")
def test_gloos_own_recorder_and_the_file_of_it(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(flight.NUM_KEPT + 5):
            dist.all_reduce(torch.ones(3))
        found = flight.read(device_answers=lambda: False)
        name = dist.group.WORLD.group_name
        assert (found.newest[name].name, found.newest[name].tensors) == ("all_reduce", (((3,), "Float"),))
        (calls,) = [one for one in calls_made(found) if one.group == name]
        assert calls.newest.startswith("all_reduce of (3,) float32")
    finally:
        dist.destroy_process_group()
    path = tmp_path / "logs" / "rank-0.flight.json"
    flight.keep(found, path)
    assert len(json.loads(path.read_text())[0]["entries"]) == flight.NUM_KEPT
    assert path.stat().st_mode & 0o777 == 0o600
