"""The batch of a failing rank: on disk for this user only, and back in the containers of the loop."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path

import pytest
import torch

from torch_watchdog_agent.rescue import bundle
from torch_watchdog_proto.messages import BatchFact, Violation


def test_a_batch_comes_back_in_the_loops_own_containers(tmp_path: Path) -> None:
    path = tmp_path / "bundles" / "0-1.safetensors"
    recorded = {"ids": torch.tensor([[1, 99]]), "more": [torch.ones(2), "a name"]}
    assert bundle.write(path, recorded)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    found = bundle.read_into(path, {"ids": torch.zeros(4, 2, dtype=torch.int64), "more": [torch.zeros(7), "another"]})
    assert torch.equal(found["ids"], recorded["ids"])
    assert torch.equal(found["more"][0], torch.ones(2))
    assert found["more"][1] == "another"


@pytest.mark.parametrize(("value", "is_same"), [(5, True), (6, False)])
def test_a_replay_tells_cause_and_fix_of_the_incident_that_the_batch_was_kept_for(tmp_path: Path, value: int, is_same: bool) -> None:
    """One batch alone may lead to another guess than the many that the launch had seen."""
    path = tmp_path / "bundles" / "0-0-step-4.safetensors"
    incident = {
        "kind": "batch.index_out_of_range", "cause": "class 0 occurs, too", "fix": "Enlarge the head", "batch": {"key": "1", "element": [6], "value": 5},
        "evidence": {"bundle": "bundles/0-0-step-4.safetensors"},
    }  # fmt: skip
    for number, content in enumerate(("torn {", json.dumps(incident | {"evidence": None}), json.dumps(incident))):
        (tmp_path / "incidents" / str(number)).mkdir(parents=True)
        (tmp_path / "incidents" / str(number) / "incident.json").write_text(content)
    fact = BatchFact(key="1", element=(6,), value=value)
    found = Violation(kind="batch.index_out_of_range", summary="1[6]", cause="no 0 was seen", fix="Renumber the classes", batch=fact)
    told = bundle.as_told_before(path, found)
    assert (told.cause, told.fix) == (("class 0 occurs, too", "Enlarge the head") if is_same else (found.cause, found.fix))
    assert bundle.as_told_before(tmp_path / "alone" / "bundles" / path.name, found) == found


def test_a_batch_that_is_too_large_is_not_kept(tmp_path: Path) -> None:
    assert not bundle.write(tmp_path / "b.safetensors", torch.ones(100), max_bytes=10)
    assert not (tmp_path / "b.safetensors").exists()


def test_a_disk_that_is_full_leaves_no_half_of_a_batch(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError):
            bundle.write(tmp_path / "b.safetensors", torch.ones(1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.iterdir()) == []


def test_another_scripts_batch_is_refused(tmp_path: Path) -> None:
    bundle.write(tmp_path / "b.safetensors", {"ids": torch.ones(1)})
    with pytest.raises(ValueError, match="no ids"):
        bundle.read_into(tmp_path / "b.safetensors", {"labels": torch.ones(1)})


def test_only_the_newest_of_a_ranks_held_batches_are_kept(tmp_path: Path) -> None:
    others = [tmp_path / "0-1.safetensors", tmp_path / bundle.held_name(attempt=0, rank=11, step=3)]
    held = [tmp_path / bundle.held_name(attempt=0, rank=1, step=step) for step in range(bundle.MAX_HELD + 2)]
    for age, path in enumerate([*others, *held]):
        path.touch()
        os.utime(path, ns=(age, age))
    bundle.keep_newest(tmp_path, attempt=0, rank=1)
    assert sorted(tmp_path.iterdir()) == sorted([*others, *held[2:]])
