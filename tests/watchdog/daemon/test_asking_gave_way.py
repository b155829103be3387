"""What whoever asked for a stop or a checkpoint hears where a rank fails before it is carried out."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from daemon_harness import FakeRank, Place, until

from torch_watchdog_proto.messages import Abandon, Committed, Order, Prepare, Saved, WriteCommitted
from torch_watchdog_proto.rescue_words import Failed, Free, Freed, Rescue

WATCHDOG = [sys.executable, "-m", "torch_watchdog.cli"]


def heard(rank: FakeRank, kind: type[Order]) -> Order:
    """The next order of that kind."""
    while not isinstance(order := rank.order(), kind):
        assert isinstance(order, Abandon), order
    return order


def asked_for(place: Place, *words: str) -> tuple[subprocess.Popen[str], FakeRank]:
    """An order is under way as rank 1 raises; rank 0 is about to say what it holds."""
    place.daemon_process()
    place.node()
    healthy, failing = place.rank(0, 2), place.rank(1, 2)
    until(lambda: place.num_ranks() == 2)
    started = {"job": "job", "session": "s", "policy": "stop", "daemon": place.socket, "started": "2026-01-31T00:00:00.000Z", "ended": None}
    (place.run_dir / "job.json").write_text(json.dumps(started | {"command": ["torchrun", "train.py"]}))
    command = [*WATCHDOG, *words, "--dir", str(place.runs)]
    asked = subprocess.Popen(command, cwd=place.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    heard(healthy, Prepare)
    failing.say(Failed(rank=1, step=9, time_ns=1, updates_applied=9, text="ValueError: a mistake", chain=("ValueError: a mistake",)))
    return asked, healthy


@pytest.mark.parametrize("command", ["stop", "checkpoint"])
def test_it_hears_of_the_checkpoint_that_the_failure_left_and_how_to_go_on(place: Place, command: str) -> None:
    asked, rank = asked_for(place, command, "job")
    free = heard(rank, Free)
    rank.say(Freed(rank=0, generation=free.generation, updates_applied=9, holds="all"))
    path = heard(rank, Rescue).path
    rank.say(Saved(rank=0, generation=free.generation, updates_applied=9, path=path, format="dcp"))
    heard(rank, WriteCommitted)
    rank.say(Committed(rank=0, generation=free.generation))
    out, err = asked.communicate(timeout=60)
    assert (asked.returncode, out.splitlines()[1]) == (0, "runs/job/checkpoints/step-9 (9 updates, verified)"), err
    assert "--resume runs/job/checkpoints/step-9 torchrun train.py" in out, out
    assert "rank 1 is gone: the order gave way to that failure" in err and "ValueError: a mistake" in err, err


def test_it_hears_why_nothing_was_saved(place: Place) -> None:
    asked, rank = asked_for(place, "stop", "job")
    free = heard(rank, Free)
    rank.say(Freed(rank=0, generation=free.generation, updates_applied=9, holds="nothing", why="half a step may have touched it"))
    out, err = asked.communicate(timeout=60)
    assert (asked.returncode, out.count("\n")) == (1, 1), out
    assert "ValueError: a mistake" in err and "nothing was saved: half a step may have touched it" in err, err
