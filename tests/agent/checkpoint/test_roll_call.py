"""Before the ranks make a group to save together all must have come: one that is dead never does, and no group that waits for it can be ended."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  makes the backend known

from torch_watchdog_agent.checkpoint.errors import CheckpointError
from torch_watchdog_agent.checkpoint.peers import RollCall, all_come


@pytest.fixture(autouse=True)
def _no_group_stays() -> Iterator[None]:
    yield
    dist.destroy_process_group()


def begin(store: dist.Store | None = None, *, backend: str = "fake", world_size: int = 2) -> None:
    """This process as one of a group: of its backend nothing is used but the store."""
    dist.init_process_group(backend, store=store or dist.HashStore(), rank=0, world_size=world_size)


def nothing() -> str:
    return ""


def test_a_rank_that_has_failed_is_waited_for_no_longer() -> None:
    begin()
    whys = iter(["", "a rank has failed: rank 1 was killed"])
    with pytest.raises(CheckpointError, match="rank 1 was killed"):
        all_come(RollCall(name="save/0/7", why_not=lambda: next(whys)), 2, timeout_s=60)
    assert next(whys, None) is None


def test_a_rank_that_is_late_is_waited_for_and_each_order_is_called_anew() -> None:
    begin()
    first = RollCall(name="save/0/1", why_not=nothing)
    others = threading.Thread(target=all_come, args=(first, 2), kwargs={"timeout_s": 60})
    others.start()
    all_come(first, 2, timeout_s=60)
    others.join(60)
    assert not others.is_alive()
    with pytest.raises(CheckpointError, match="within 0 s"):
        all_come(RollCall(name="save/0/2", why_not=nothing), 2, timeout_s=0)


def test_where_each_rank_is_a_group_of_its_own_nobody_is_waited_for() -> None:
    begin(backend="gloo", world_size=1)
    looks: list[str] = []
    with pytest.raises(CheckpointError, match="2 ranks, but 1 in the process group"):
        all_come(RollCall(name="save/0/1", why_not=lambda: looks.append("waited") or ""), 2, timeout_s=60)
    assert not looks


def _keep_a_store(port: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    port.send(store.port)
    port.recv()


def test_a_store_whose_host_is_gone_ends_the_wait() -> None:
    ours, theirs = multiprocessing.Pipe()
    host = multiprocessing.get_context("spawn").Process(target=_keep_a_store, args=(theirs,))
    host.start()
    try:
        begin(dist.TCPStore("127.0.0.1", ours.recv(), None, is_master=False, wait_for_workers=False))

        def the_host_dies() -> str:
            host.kill()
            host.join(60)
            return ""

        with pytest.raises(CheckpointError, match="store is lost"):
            all_come(RollCall(name="save/0/1", why_not=the_host_dies), 2, timeout_s=60)
    finally:
        host.kill()
