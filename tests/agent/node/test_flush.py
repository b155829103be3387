"""How often a node reports: as it likes, or as far apart as a daemon of many nodes wants it; and as it likes again once that daemon is away."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from torch_watchdog.daemon.services import apart_ms
from torch_watchdog.rules.loss import patience_s
from torch_watchdog_agent.node.config import NodeConfig
from torch_watchdog_agent.node.stream import DaemonLink
from torch_watchdog_proto import codec
from torch_watchdog_proto.envelopes import DaemonAnswers, GoodbyeAck, ReportAck


class Telemetry:
    """The node's end of a stream on which these answers come."""

    def __init__(self, *answers: DaemonAnswers) -> None:
        self._answers = iter(answers)

    async def read(self) -> Any:
        return codec.daemon_message(next(self._answers))


def link(folder: Path) -> DaemonLink:
    config = NodeConfig(
        job="j",
        node="n",
        session="s",
        policy="stop",
        command=("train",),
        run_dir=folder,
        runtime_dir=folder,
        ring_dir=folder,
        daemon="unix:/nowhere",
    )
    return DaemonLink(config, on_order=lambda _: None, hellos=tuple, say=lambda _: None)


@pytest.mark.parametrize(("every_ms", "every_s"), [(0, 0.0), (4000, 4.0), (3_600_000, 5.0)])
def test_the_newest_ack_says_how_far_apart_reports_are_within_what_a_ring_holds(tmp_path: Path, every_ms: int, every_s: float) -> None:
    async def heard() -> float:
        one = link(tmp_path)
        await one._read_answers(Telemetry(ReportAck(seq=1, every_ms=77), ReportAck(seq=2, every_ms=every_ms), GoodbyeAck(exit_code=0)))
        return one.report_every_s

    assert asyncio.run(heard()) == every_s


def test_without_its_daemon_a_node_looks_as_often_as_ever(tmp_path: Path) -> None:
    async def lost() -> float:
        one = link(tmp_path)
        await one._read_answers(Telemetry(ReportAck(seq=1, every_ms=4000), GoodbyeAck(exit_code=0)))
        one._lost("gone")
        return one.report_every_s

    assert asyncio.run(lost()) == 0.0


@pytest.mark.parametrize(("nodes", "every_ms"), [(1, 4), (100, 400), (512, 2048), (2048, 4000), (50_000, 4000)])
def test_all_nodes_of_a_job_together_report_as_often_as_one_daemon_takes(nodes: int, every_ms: int) -> None:
    assert apart_ms(nodes) == every_ms


@pytest.mark.parametrize("nodes", [1, 64, 512, 2048])
def test_a_loss_that_is_no_number_waits_for_what_nodes_that_report_less_often_have_still_to_say(nodes: int) -> None:
    assert patience_s(nodes) >= apart_ms(nodes) / 1000 + 1
