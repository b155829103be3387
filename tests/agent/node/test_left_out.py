"""What does not fit the wire is left out, once with a sentence: kept and sent again, it would end each new line to the daemon."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from torch_watchdog_agent.node.config import NodeConfig
from torch_watchdog_agent.node.stream import DaemonLink
from torch_watchdog_proto import codec
from torch_watchdog_proto.envelopes import RankLost
from torch_watchdog_proto.messages import NodeGoodbye, NodeReport, RankEvent


class Stream:
    """The node's end of one, to a daemon that takes all."""

    def __init__(self, until: int) -> None:
        self.written: list[Any] = []
        self._until, self.full = until, asyncio.Event()

    async def write(self, message: Any) -> None:
        self.written.append(message)
        if len(self.written) == self._until:
            self.full.set()


def test_one_broken_record_does_not_end_the_line_for_the_others(tmp_path: Path) -> None:
    said: list[str] = []
    config = NodeConfig(
        job="j", node="n", session="s", policy="stop", command=("train",), run_dir=tmp_path, runtime_dir=tmp_path, ring_dir=tmp_path,
        daemon="unix:/nowhere",
    )  # fmt: skip

    async def both() -> tuple[Stream, Stream]:
        link = DaemonLink(config, on_order=lambda _: None, hellos=lambda: (), say=said.append)
        for rank in (0, -1, 1):
            link.tell(RankLost(attempt=0, rank=rank, pid=7))
        for pid in (7, 10**400, 8):
            link.report(NodeReport(seq=0, time_ns=0, events=(RankEvent(rank=0, attempt=0, pid=pid, kind="started", time_ns=0, order=1),)))
        control, telemetry = Stream(2), Stream(2)
        works = [asyncio.create_task(work) for work in (link._send_control(control), link._send_reports(telemetry))]
        async with asyncio.timeout(10):
            await control.full.wait()
            await telemetry.full.wait()
        for work in works:
            work.cancel()
        return control, telemetry

    control, telemetry = asyncio.run(both())
    assert [codec.read_control_message(one).rank for one in control.written] == [0, 1]  # type: ignore[union-attr]
    reports = [codec.read_node_message(one) for one in telemetry.written]
    assert [one.events[0].pid for one in reports if isinstance(one, NodeReport)] == [7, 8]
    assert len(said) == 1 and "left out" in said[0]
    assert NodeGoodbye not in map(type, reports)
