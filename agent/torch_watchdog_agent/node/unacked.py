"""Reports that the daemon has not confirmed: kept for a resend, within a bound.

Owns the numbers of reports and what gives way when the daemon is away for long. Pure; knows no socket or clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from torch_watchdog_proto.messages import NodeReport

__all__ = ["UnackedReports"]


class UnackedReports:
    """A queue by number. The oldest give way past `max_bytes`, and every later report says how many there were."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._reports: deque[tuple[NodeReport, int]] = deque()
        self._bytes = 0
        self._next_seq = 1
        self._sent_seq = 0
        self.num_dropped = 0

    def add(self, report: NodeReport) -> None:
        """Numbers the report and keeps it."""
        numbered = replace(report, seq=self._next_seq, dropped_reports=self.num_dropped)
        size = _estimated_bytes(numbered)
        self._next_seq += 1
        self._reports.append((numbered, size))
        self._bytes += size
        while self._bytes > self._max_bytes and len(self._reports) > 1:
            self._drop_first()
            self.num_dropped += 1

    def next_to_send(self) -> NodeReport | None:
        """The oldest that was not sent on this connection; counts as sent from then on."""
        if not self._reports:
            return None
        place = max(0, self._sent_seq + 1 - self._reports[0][0].seq)  # numbers have no gaps in here
        if place >= len(self._reports):
            return None
        report, _ = self._reports[place]
        self._sent_seq = report.seq
        return report

    def acked(self, seq: int) -> None:
        """The daemon has every report up to `seq`."""
        while self._reports and self._reports[0][0].seq <= seq:
            self._drop_first()

    def reconnected(self, next_seq: int) -> None:
        """A new connection: what the daemon has is forgotten, the rest is sent again."""
        self.acked(next_seq - 1)
        self._sent_seq = next_seq - 1

    def _drop_first(self) -> None:
        _, size = self._reports.popleft()
        self._bytes -= size


def _estimated_bytes(report: NodeReport) -> int:
    """In memory, roughly: what counts is the number of column entries."""
    steps = report.steps
    entries = 10 * len(steps.rank) + 10 * len(steps.micro_step) + 11 * len(steps.step)
    entries += sum(12 * len(tensor.rows) for tensor in steps.tensors)
    texts = sum(200 + len(event.text) for event in report.events)
    return 200 + 40 * entries + 500 * len(steps.tensors) + texts + 300 * len(report.gpus)
