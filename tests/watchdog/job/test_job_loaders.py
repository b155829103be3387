"""Which ranks are asked about their data loaders, and what a sentence takes of the answer."""

from __future__ import annotations

from typing import Any

from torch_watchdog.job.loaders import LoaderLooks, words_of_loader


def incident(rank: int | None, number: str = "1", kind: str = "loader.stalled") -> dict[str, Any]:
    return {"kind": kind, "id": number, "origin": {"rank": rank}}


def test_a_rank_is_asked_once_and_only_about_its_data() -> None:
    looks = LoaderLooks()
    assert [looks.should_ask(incident(3)), looks.should_ask(incident(3)), looks.should_ask(incident(4, kind="rank.straggler"))] == [
        True,
        False,
        False,
    ]
    assert (looks.incident_of(3), looks.incident_of(4)) == ("1", None)


def test_where_all_ranks_wait_some_are_asked() -> None:
    looks = LoaderLooks()
    assert sum(looks.should_ask(incident(rank)) for rank in range(16_384)) == 8


def test_a_sentence_names_a_few_processes_and_no_stack() -> None:
    text = "".join(f"worker, pid {number}: waits\n    frame (t.py:{number})\n" for number in range(20))
    words = words_of_loader(text)
    assert words.count("worker, pid") == 8 and words.endswith("; and 12 more") and "frame" not in words
