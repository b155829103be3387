"""What differs between ranks although torch takes it for whole: each rank keeps its own, lists of another length and numbers too."""

from __future__ import annotations

import threading
from typing import Any

import torch

from torch_watchdog_agent.checkpoint.dcp import split_own
from torch_watchdog_agent.checkpoint.state import _items, as_leaf, from_leaf, with_lists


class Two:
    """Two ranks of one process: `gather` as their process group would do it."""

    def __init__(self) -> None:
        self._barrier, self._said = threading.Barrier(2), {}

    def of(self, index: int) -> Any:
        outer = self

        class Peers:
            def __init__(self) -> None:
                self.index = index

            def agree_own(self, work: Any) -> Any:
                return work()

            def gather(self, item: Any) -> list[Any]:
                outer._said[index] = item
                outer._barrier.wait(30)
                both = [outer._said[0], outer._said[1]]
                outer._barrier.wait(30)
                return both

        return Peers()


def kept(*states: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    two, parts = Two(), [({}, {}), ({}, {})]

    def split(index: int) -> None:
        parts[index] = split_own(states[index], two.of(index))

    threads = [threading.Thread(target=split, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return parts


def read_back(parts: list[tuple[dict[str, Any], dict[str, Any]]], index: int) -> dict[str, Any]:
    """As a rank reads it: torch's files hold one copy of each name, and its own come first."""
    shared = {**parts[1][0], **parts[0][0]}
    return with_lists({name: from_leaf(value) for name, value in {**shared, **parts[index][1]}.items()})


def flat(entries: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in entries.items():
        found |= _items(name, value)
    return found


def plain(entries: dict[str, Any]) -> Any:
    def listed(value: Any) -> Any:
        return value.tolist() if isinstance(value, torch.Tensor) else [listed(item) for item in value] if isinstance(value, list) else value

    return {name: listed(value) for name, value in entries.items()}


def test_each_rank_reads_its_own_lists_and_numbers() -> None:
    history = [torch.full((3,), float(number)) for number in range(4)]
    first = {"dirs": history[:2], "al": [None, torch.ones(())], "same": torch.ones(2), "loss": 0.25, "step": 7, "none_yet": []}
    second = {"dirs": history[1:], "al": [None, None], "same": torch.ones(2), "loss": 0.5, "step": 7, "none_yet": [torch.zeros(1)]}
    for one, other in ((first, second), (second, first)):
        parts = kept(flat(one), flat(other))
        assert plain(read_back(parts, 0)) == plain(one)
        assert plain(read_back(parts, 1)) == plain(other)
        assert "same" not in parts[1][1] and "step" not in parts[1][1]


def test_what_json_would_not_give_back_as_it_is_stays_with_the_lowest_rank() -> None:
    parts = kept({"odd": as_leaf({1: 2})}, {"odd": as_leaf({1: 3})})
    assert parts[1][1] == {}
