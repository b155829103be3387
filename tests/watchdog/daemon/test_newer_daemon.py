"""A daemon of a newer version may answer in words that are not known here: a person is told which, and what to do."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from torch_watchdog.daemon.client import DaemonClient, UnreadStatus
from torch_watchdog.errors import DaemonAnswerError
from torch_watchdog_proto.v1 import query_pb2, query_pb2_grpc


class Newer(query_pb2_grpc.QueryServicer):  # type: ignore[misc]
    def GetJob(self, request: Any, context: Any) -> Any:
        return query_pb2.JobStatus(job="train-1", state="paused", policy="stop")

    def ListJobs(self, request: Any, context: Any) -> Any:
        known = query_pb2.JobStatus(job="train-2", state="ended", policy="skip", exit_code=65)
        return query_pb2.ListJobsAnswer(jobs=[self.GetJob(request, context), known])

    def ListIncidents(self, request: Any, context: Any) -> Any:
        return query_pb2.ListIncidentsAnswer(incidents_json=['{"id":'])

    def GetContract(self, request: Any, context: Any) -> Any:
        return query_pb2.ContractAnswer(contract_json="[]")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    address = f"unix:{Path(tmp_path_factory.mktemp('newer')) / 'd'}"
    server = grpc.server(futures.ThreadPoolExecutor(2))
    query_pb2_grpc.add_QueryServicer_to_server(Newer(), server)
    server.add_insecure_port(address)
    server.start()
    yield address
    server.stop(None)


@pytest.fixture
def client(address: str) -> Iterator[DaemonClient]:
    with DaemonClient(address) as client:
        yield client


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (lambda client: client.job("train-1"), "state must be one of .* not 'paused'"),
        (lambda client: client.incidents("train-1"), "Expecting value"),
        (lambda client: client.contract("train-1"), "a list in the place of an object"),
    ],
    ids=["a state", "half an incident", "a list"],
)
def test_an_answer_that_is_not_understood_is_no_fault_of_ours(
    client: DaemonClient, ask: Callable[[DaemonClient], object], what: str
) -> None:
    with pytest.raises(
        DaemonAnswerError, match=rf"(?s)answers what this version does not know \(.*{what}.*\): use the `watchdog` of its version"
    ):
        ask(client)


def test_of_several_jobs_one_in_an_unknown_state_is_told_as_that_beside_the_others(client: DaemonClient) -> None:
    unknown, known = client.jobs()
    assert (unknown.job, unknown.state, known.job, known.exit_code) == ("train-1", "unknown", "train-2", 65)
    assert isinstance(unknown, UnreadStatus)
    assert "not 'paused'" in unknown.problem and "use the `watchdog` of its version" in unknown.problem


def test_the_list_of_jobs_shows_it_and_says_why(address: str) -> None:
    words = [sys.executable, "-m", "torch_watchdog.cli", "jobs", "--daemon", address]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert re.search(r"train-1 +unknown", done.stdout) and re.search(r"train-2 +ended .* 65", done.stdout)
    assert "job train-1: its daemon tells of it what this version does not know" in done.stderr
