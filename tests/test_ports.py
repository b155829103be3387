"""The ports of tests that run side by side."""

from __future__ import annotations

import itertools

import pytest
from ports import free_port, ports_of


@pytest.mark.parametrize("workers", [1, 2, 4, 16, 128])
def test_workers_share_no_port_however_many_there_are(workers: int) -> None:
    ours = [ports_of(worker, workers) for worker in range(workers)]
    assert all(before.stop <= after.start for before, after in itertools.pairwise(ours))
    assert all(len(one) >= 78 and one.start >= 22_000 and one.stop <= 32_000 for one in ours)


def test_who_replaces_a_worker_has_ports_too() -> None:
    assert ports_of(5, 2) == ports_of(1, 2)


def test_a_port_is_not_given_again_at_once() -> None:
    assert len({free_port() for _ in range(50)}) == 50
