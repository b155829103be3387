"""The gRPC service of the command line: what the daemon knows of its jobs, and orders for them.

Owns no state. Steps are read from the run directory, by way of the index where there is one, never from memory.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc

from torch_watchdog.daemon.calls import Calls, checked
from torch_watchdog.daemon.grants import OWNER
from torch_watchdog.daemon.ingest import Ingest
from torch_watchdog.job.events import OrderRequested, Refused
from torch_watchdog.store.read import read_blocks
from torch_watchdog.store.run_directory import RunDirectory
from torch_watchdog_proto import codec
from torch_watchdog_proto.envelopes import ORDER_KINDS, OrderAnswer, OrderKind
from torch_watchdog_proto.messages import StepBlock
from torch_watchdog_proto.v1 import query_pb2, query_pb2_grpc

if TYPE_CHECKING:
    from torch_watchdog.store.index import BlockIndex

__all__ = ["QueryService"]

_BLOCKS_AT_ONCE = 64
_MAX_CONTRACT_BYTES = 4 << 20


class QueryService(query_pb2_grpc.QueryServicer):  # type: ignore[misc]
    """One method a question."""

    def __init__(self, ingest: Ingest, calls: Calls, *, index: BlockIndex | None) -> None:
        self._ingest, self.calls, self._index = ingest, calls, index
        self._reading = asyncio.Lock()

    @checked("look")
    async def ListJobs(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002 - gRPC's names
        answer = query_pb2.ListJobsAnswer()
        grant = self.calls.grant(context)
        for live in reversed([live for live in self._ingest.jobs if grant is not None and grant.fits(live.job.name)]):
            status = codec.plain_message(live.job.status())
            status.ClearField("ranks")
            answer.jobs.append(status)
        return answer

    @checked("look")
    async def GetJob(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.check_job(context, request.job)
        return codec.plain_message(self._ingest.live(request.job).job.status())

    @checked("look")
    async def ListIncidents(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.check_job(context, request.job)
        incidents = self._ingest.live(request.job).job.incidents
        return query_pb2.ListIncidentsAnswer(incidents_json=[json.dumps(incident, allow_nan=False) for incident in incidents])

    @checked("look")
    async def GetSteps(self, request: Any, context: Any) -> None:  # noqa: N802
        self.calls.check_job(context, request.job)
        run_dir = self._ingest.live(request.job).run_dir
        wanted = {name: getattr(request, name) for name in ("rank", "first_step", "last_step") if request.HasField(name)}
        async with self._reading:
            async for block in self._blocks(run_dir, wanted):
                await context.write(codec.plain_message(block))

    async def _blocks(self, run_dir: Path, wanted: dict[str, int]) -> AsyncIterator[StepBlock]:
        """A few at a time, in another thread: the loop has orders to send meanwhile."""
        blocks = self._found(run_dir, wanted)
        while some := await asyncio.to_thread(lambda: list(itertools.islice(blocks, _BLOCKS_AT_ONCE))):
            for block in some:
                yield block

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
        live = self._ingest.live(request.job)
        wanted = OrderRequested(kind=cast("OrderKind", request.kind), by=request.by[:200], reason=request.reason[:1000])
        refusal = next((effect for effect in live.handle(wanted) if isinstance(effect, Refused)), None)
        answer = OrderAnswer(accepted=refusal is None, text="every rank is told" if refusal is None else refusal.reason)
        who = (self.calls.grant(context) or OWNER).name
        self.calls.audit.note(request.kind, request.job, who=who, says=request.by, accepted=answer.accepted, reason=request.reason)
        return codec.plain_message(answer)

    @checked("look")
    async def GetContract(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.check_job(context, request.job)
        path = RunDirectory(self._ingest.live(request.job).run_dir).contract_file(request.rank)
        text = await asyncio.to_thread(_read_bounded, path)
        if text is None:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"rank {request.rank} has written no contract yet: it learns in its first steps"
            )
        return query_pb2.ContractAnswer(contract_json=text)


def _read_bounded(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_CONTRACT_BYTES + 1)
    except OSError:
        return None
    return data.decode("utf-8", "replace") if len(data) <= _MAX_CONTRACT_BYTES else None
