"""Before the ranks make a group to save together all must have come: one that is dead never does, and no group that waits for it can be ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from torch_watchdog_agent.checkpoint.errors import CheckpointError
from torch_watchdog_agent.checkpoint.peers import RollCall, all_come


@pytest.fixture(autouse=True)
def _one_process_of_a_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def nothing() -> str:
    return ""


def test_a_rank_that_has_failed_is_waited_for_no_longer() -> None:
    whys = iter(["", "another rank has failed: rank 1 was killed"])
    with pytest.raises(CheckpointError, match="rank 1 was killed"):
        all_come(RollCall(name="save/0/7", why_not=lambda: next(whys)), 2, timeout_s=60)
    assert next(whys, None) is None


def test_a_rank_that_is_late_is_waited_for_and_each_order_is_called_anew() -> None:
    first = RollCall(name="save/0/1", why_not=nothing)
    others = threading.Thread(target=all_come, args=(first, 2), kwargs={"timeout_s": 60})
    others.start()
    all_come(first, 2, timeout_s=60)
    others.join(60)
    assert not others.is_alive()
    with pytest.raises(CheckpointError, match="within 0 s"):
        all_come(RollCall(name="save/0/2", why_not=nothing), 2, timeout_s=0)
