"""Which ranks are asked about their data loaders, and what a sentence takes of the answer."""

from __future__ import annotations

from typing import Any

from torch_watchdog.job.loaders import LoaderLooks, words_of_loader


def incident(rank: int | None, number: str = "1", kind: str = "loader.stalled", affected: tuple[int, ...] = ()) -> dict[str, Any]:
    return {"kind": kind, "id": number, "origin": {"rank": rank}, "ranks_affected": list(affected)}


def test_a_rank_is_asked_once_and_only_about_its_data() -> None:
    looks = LoaderLooks()
    assert [looks.whom_to_ask(one) for one in (incident(3), incident(3), incident(4, kind="rank.straggler"))] == [3, None, None]
    assert (looks.incident_of(3), looks.incident_of(4)) == ("1", None)


def test_where_all_ranks_wait_some_are_asked() -> None:
    looks = LoaderLooks()
    assert sum(looks.whom_to_ask(incident(rank)) is not None for rank in range(16_384)) == 8


def test_where_most_ranks_are_one_finding_the_first_of_them_is_asked() -> None:
    looks = LoaderLooks()
    assert looks.whom_to_ask(incident(None, affected=(3, 5))) == 3
    assert looks.incident_of(3) == "1"
    assert LoaderLooks().whom_to_ask(incident(None)) is None


def test_a_sentence_names_a_few_processes_and_no_stack() -> None:
    text = "".join(f"worker, pid {number}: waits\n    frame (t.py:{number})\n" for number in range(20))
    words = words_of_loader(text)
    assert words.count("worker, pid") == 8 and words.endswith("; and 12 more") and "frame" not in words
