"""A running job in the lines of a terminal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch_watchdog.report.live import live_lines
from torch_watchdog.report.text import plain
from torch_watchdog_proto.envelopes import JobStatus, RankStatus

NOW_S = 1_000.0


def rank(number: int, **more: Any) -> RankStatus:
    known: dict[str, Any] = {"phase": "train", "alive": True, "last_step": 40, "loss": 1.5, "step_time_s": 0.2, "last_seen_s": NOW_S}
    return RankStatus(rank=number, node=f"node-{number // 8}", pid=1, **(known | more))


def job(*ranks: RankStatus) -> JobStatus:
    return JobStatus(
        job="j", state="running", policy="stop", attempt=0, world_size=len(ranks), run_dir="r", started_s=NOW_S - 75, ranks=ranks
    )


def shown(*ranks: RankStatus, incidents: tuple[dict[str, Any], ...] = (), height: int = 24, width: int = 80) -> list[str]:
    return [plain(line) for line in live_lines(job(*ranks), incidents, now_s=NOW_S, height=height, width=width)]


def test_few_ranks_have_a_line_each() -> None:
    lines = shown(rank(0), rank(1, step_time_s=0.9, last_step=38, last_seen_s=NOW_S - 30))
    assert lines[0] == "job j, running, 1:15, 2 ranks, policy stop, 0 incidents"
    assert lines[1] == "median step 550 ms, slowest rank 1 with 900 ms, furthest behind rank 1 at step 38"[:80].rstrip()
    assert lines[4].split() == ["0", "node-0", "train", "40", "1.5", "200", "ms", "now"]
    assert lines[5].endswith("30 s ago")


def test_more_ranks_than_lines_are_told_by_node_those_behind_first() -> None:
    lines = shown(*(rank(number, last_step=7 if number == 100 else 40) for number in range(16_384)))
    assert lines[4].startswith("node-12 ") and "7..40" in lines[4]
    assert len(lines) <= 24 and "nodes that are further on" in "\n".join(lines)


def test_the_last_finding_stays_in_sight_and_orders_are_none() -> None:
    found = {"kind": "loss.spike", "severity": "warning", "summary": "rank 0\x1b[31m"}
    asked = {"kind": "order.checkpoint", "severity": "info", "summary": "asked"}
    assert shown(rank(0), incidents=(found, asked))[-1] == "last finding: loss.spike: rank 0 [31m"


def test_no_line_is_wider_than_the_terminal_and_none_is_below_it() -> None:
    for height in (3, 9, 24):
        lines = shown(*(rank(number) for number in range(40)), incidents=({"kind": "k", "summary": "s" * 200},), height=height, width=40)
        assert len(lines) <= height and max(map(len, lines)) <= 40


def test_a_standstill_stands_where_the_pace_does() -> None:
    still = replace(job(rank(0), rank(1)), standstill="rank 0 waits for rank 1: no step for 13 s")
    assert plain(live_lines(still, (), now_s=NOW_S, height=24, width=80)[1]) == still.standstill


def test_a_job_whose_ranks_have_not_reported_says_so() -> None:
    assert "no step has been reported yet" in shown()
