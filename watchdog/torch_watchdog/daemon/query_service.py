"""The gRPC service of the command line: what the daemon knows of its jobs, those that ended before it began included, and orders for them.

Owns no state. Steps are read from the run directory, by way of the index where there is one, never from memory.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc

from torch_watchdog.daemon.calls import Calls, checked
from torch_watchdog.daemon.grants import OWNER
from torch_watchdog.errors import SlowReaderError
from torch_watchdog.store.read import read_blocks
from torch_watchdog.store.run_directory import RunDirectory
from torch_watchdog_proto import codec
from torch_watchdog_proto.envelopes import ORDER_KINDS, OrderKind
from torch_watchdog_proto.messages import StepBlock
from torch_watchdog_proto.v1 import query_pb2, query_pb2_grpc

if TYPE_CHECKING:
    from torch_watchdog.daemon.view import FleetView
    from torch_watchdog.store.index import BlockIndex

__all__ = ["QueryService"]

_BLOCKS_AT_ONCE = 64
_LARGEST_STEP = (1 << 63) - 1  # that SQLite can look for
_PATIENCE_S = 30.0  # a caller may let one block of an answer wait so long
_MAX_CONTRACT_BYTES = 4 << 20


class QueryService(query_pb2_grpc.QueryServicer):  # type: ignore[misc]
    """One method a question."""

    def __init__(self, view: FleetView, calls: Calls, *, index: BlockIndex | None) -> None:
        self._view, self.calls, self._index = view, calls, index
        self._reading = asyncio.Lock()

    @checked("look")
    async def ListJobs(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002 - gRPC's names
        answer = query_pb2.ListJobsAnswer()
        grant = self.calls.grant(context)
        live = [live.job.status() for live in reversed(self._view.live_jobs())]
        for job in (*live, *(await self._view.past_jobs()).jobs):
            if grant is not None and grant.fits(job.job):
                status = codec.plain_message(job)
                status.ClearField("ranks")
                answer.jobs.append(status)
        return answer

    @checked("look")
    async def GetJob(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.check_job(context, request.job)
        return codec.plain_message(await self._view.any_job(request.job))

    @checked("look")
    async def ListIncidents(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.check_job(context, request.job)
        incidents = await self._view.any_incidents(request.job)
        return query_pb2.ListIncidentsAnswer(incidents_json=[json.dumps(incident, allow_nan=False) for incident in incidents])

    @checked("look")
    async def GetSteps(self, request: Any, context: Any) -> None:  # noqa: N802
        self.calls.check_job(context, request.job)
        run_dir = await self._view.any_run_dir(request.job)
        wanted = {
            name: min(getattr(request, name), _LARGEST_STEP) for name in ("rank", "first_step", "last_step") if request.HasField(name)
        }
        async for block in self._blocks(run_dir, wanted):
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    await context.write(codec.plain_message(block))
            except TimeoutError as error:
                raise SlowReaderError(_PATIENCE_S) from error

    async def _blocks(self, run_dir: Path, wanted: dict[str, int]) -> AsyncIterator[StepBlock]:
        """A few at a time, in another thread: the loop has orders to send meanwhile."""
        blocks = self._found(run_dir, wanted)
        while some := await self._read(lambda: list(itertools.islice(blocks, _BLOCKS_AT_ONCE))):
            for block in some:
                yield block

    async def _read(self, work: Callable[[], list[StepBlock]]) -> list[StepBlock]:
        async with self._reading:  # the index is for one reader at a time; nobody's connection is waited for in here
            return await self._view.disk.read(work)

    def _found(self, run_dir: Path, wanted: dict[str, int]) -> Iterator[StepBlock]:
        if self._index is not None:
            try:
                yield from self._index.blocks(run_dir, **wanted)
            except OSError:
                self._index = None  # a broken cache: the segments still have it all
            else:
                return
        yield from read_blocks(run_dir, **wanted)

    @checked("order")
    async def RequestOrder(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.check_job(context, request.job)
        if request.kind not in ORDER_KINDS:
            raise codec.MalformedMessageError(f"{request.kind[:40]!r} is no order: use one of {', '.join(ORDER_KINDS)}")
        who = (self.calls.grant(context) or OWNER).name
        kind = cast("OrderKind", request.kind)
        return codec.plain_message(await self._view.request_order(request.job, kind, by=request.by, reason=request.reason, who=who))

    @checked("look")
    async def GetContract(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.check_job(context, request.job)
        path = RunDirectory(await self._view.any_run_dir(request.job)).contract_file(request.rank)
        text = await self._view.disk.read(lambda: _read_bounded(path))
        if text is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, await self._no_contract(request.job, request.rank))
        return query_pb2.ContractAnswer(contract_json=text)

    async def _no_contract(self, job: str, rank: int) -> str:
        of_launch = (await self._view.any_job(job)).run_dir
        if Path(of_launch) != await self._view.any_run_dir(job):
            return f"what ranks have learned lies with their launch, not with this daemon: `watchdog contract` where {of_launch} is"
        return f"rank {rank} has written no contract yet: it learns in its first steps"


def _read_bounded(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_CONTRACT_BYTES + 1)
    except OSError:
        return None
    return data.decode("utf-8", "replace") if len(data) <= _MAX_CONTRACT_BYTES else None
