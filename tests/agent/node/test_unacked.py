"""Reports that wait for their ack: each is sent until it is acked, none is sent twice on one line, and the bound holds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torch_watchdog_agent.node.unacked import UnackedReports
from torch_watchdog_proto.messages import NodeReport, RankEvent


def report(text: str = "") -> NodeReport:
    event = RankEvent(rank=0, attempt=0, pid=1, kind="note", time_ns=0, order=1, text=text)
    return NodeReport(seq=0, time_ns=0, events=(event,))


def sent(reports: UnackedReports) -> list[int]:
    return [one.seq for one in iter(reports.next_to_send, None)]


def test_reports_are_numbered_and_sent_once_a_line() -> None:
    reports = UnackedReports(max_bytes=1 << 20)
    for _ in range(3):
        reports.add(report())
    assert (sent(reports), sent(reports)) == ([1, 2, 3], [])


def test_a_new_line_sends_what_the_daemon_does_not_have() -> None:
    reports = UnackedReports(max_bytes=1 << 20)
    for _ in range(4):
        reports.add(report())
    sent(reports)
    reports.acked(1)
    reports.reconnected(next_seq=3)
    assert sent(reports) == [3, 4]


def test_a_daemon_that_forgot_gets_what_is_still_here() -> None:
    reports = UnackedReports(max_bytes=1 << 20)
    for _ in range(3):
        reports.add(report())
    reports.acked(2)
    reports.reconnected(next_seq=1)
    assert sent(reports) == [3]


def test_the_oldest_give_way_and_the_next_report_says_how_many() -> None:
    reports = UnackedReports(max_bytes=5_000)
    for _ in range(10):
        reports.add(report("x" * 1000))
    assert reports.num_dropped > 5
    kept = sent(reports)
    assert kept == list(range(11 - len(kept), 11))
    reports.add(report())
    last = reports.next_to_send()
    assert last is not None and last.dropped_reports == reports.num_dropped


@given(st.lists(st.one_of(st.just("add"), st.just("send"), st.integers(0, 12)), max_size=40))
def test_whatever_happens_numbers_are_sent_in_order_and_the_bound_holds(steps: list[str | int]) -> None:
    reports, last = UnackedReports(max_bytes=3_000), 0
    for step in steps:
        if step == "add":
            reports.add(report("x" * 200))
        elif step == "send":
            one = reports.next_to_send()
            if one is not None:
                assert one.seq > last
                last = one.seq
        else:
            reports.acked(min(int(step), last))
