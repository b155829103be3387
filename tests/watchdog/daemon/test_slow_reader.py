"""A caller that asks for many steps and does not read them: nobody else waits for it, and it is given up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from fleet_harness import Fleet, until

from torch_watchdog.daemon import query_service
from torch_watchdog.daemon.client import DaemonClient
from torch_watchdog.store.job_files import JobFiles
from torch_watchdog_proto.messages import NodeReport, StepBlock, StepTable
from torch_watchdog_proto.v1 import query_pb2, query_pb2_grpc

NUM_BLOCKS, STEPS_EACH = 400, 2_000  # far more than gRPC keeps on the way


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = JobFiles(tmp_path / "runs" / "long")
    for number in range(NUM_BLOCKS):
        steps = range(number * STEPS_EACH, (number + 1) * STEPS_EACH)
        block = StepBlock(rank=0, attempt=0, pid=7, first_record=1, step=tuple(steps), step_ns=tuple(step * 7919 for step in steps))
        files.append_report("node", "session", NodeReport(seq=number + 1, time_ns=1, steps=StepTable.of((block,))))
    files.append_event({"order": 1, "kind": "node.left", "exit_code": 0})
    files.close()
    return tmp_path


@contextlib.contextmanager
def stalled(fleet: Fleet) -> Iterator[Iterator[object]]:
    """An answer of which the first block has been read, and no more."""
    with grpc.insecure_channel(fleet.socket) as channel:
        answer = query_pb2_grpc.QueryStub(channel).GetSteps(query_pb2.GetStepsRequest(job="long"))
        next(answer)
        yield answer


def is_given_up(fleet: Fleet) -> bool:
    return 'refused_calls_total{reason="grpc_SlowReaderError"} 1.0' in fleet.get("metrics").text


def test_others_get_their_steps_beside_it_and_where_it_was_only_slow_it_gets_all_of_its_own(folder: Path) -> None:
    with Fleet(folder) as fleet, stalled(fleet) as answer, DaemonClient(fleet.socket, timeout_s=20.0) as client:
        for _ in range(2):
            assert len(client.steps("long")) == NUM_BLOCKS
        assert 1 + sum(1 for _ in answer) == NUM_BLOCKS


def test_it_is_given_up_and_told_so_when_it_reads_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_service, "_PATIENCE_S", 0.2)
    with Fleet(folder) as fleet, stalled(fleet) as answer:
        until(lambda: is_given_up(fleet))
        with pytest.raises(grpc.RpcError) as raised:
            list(answer)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "nothing of it was read for 0.2 s" in raised.value.details()


def test_that_it_goes_without_a_word_is_no_error_of_the_daemons(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(query_service, "_PATIENCE_S", 0.2)
    with Fleet(folder) as fleet, stalled(fleet):
        until(lambda: is_given_up(fleet))
    assert [record.getMessage() for record in caplog.records if record.name.startswith(("grpc", "asyncio"))] == []
