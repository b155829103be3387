"""A daemon of a newer version may answer in words that are not known here: a person is told which, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from torch_watchdog.daemon.client import DaemonClient
from torch_watchdog.errors import DaemonAnswerError
from torch_watchdog_proto.v1 import query_pb2, query_pb2_grpc


class Newer(query_pb2_grpc.QueryServicer):  # type: ignore[misc]
    def GetJob(self, request: Any, context: Any) -> Any:
        return query_pb2.JobStatus(job="train-1", state="paused", policy="stop")

    def ListJobs(self, request: Any, context: Any) -> Any:
        return query_pb2.ListJobsAnswer(jobs=[self.GetJob(request, context)])

    def ListIncidents(self, request: Any, context: Any) -> Any:
        return query_pb2.ListIncidentsAnswer(incidents_json=['{"id":'])

    def GetContract(self, request: Any, context: Any) -> Any:
        return query_pb2.ContractAnswer(contract_json="[]")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonClient]:
    address = f"unix:{Path(tmp_path_factory.mktemp('newer')) / 'd'}"
    server = grpc.server(futures.ThreadPoolExecutor(2))
    query_pb2_grpc.add_QueryServicer_to_server(Newer(), server)
    server.add_insecure_port(address)
    server.start()
    with DaemonClient(address) as client:
        yield client
    server.stop(None)


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (lambda client: client.job("train-1"), "state must be one of .* not 'paused'"),
        (lambda client: client.jobs(), "not 'paused'"),
        (lambda client: client.incidents("train-1"), "Expecting value"),
        (lambda client: client.contract("train-1"), "a list in the place of an object"),
    ],
    ids=["a state", "of one of several jobs", "half an incident", "a list"],
)
def test_an_answer_that_is_not_understood_is_no_fault_of_ours(
    client: DaemonClient, ask: Callable[[DaemonClient], object], what: str
) -> None:
    with pytest.raises(
        DaemonAnswerError, match=rf"(?s)answers what this version does not know \(.*{what}.*\): use the `watchdog` of its version"
    ):
        ask(client)
