"""START HERE for the daemon: open the store, wire the services, listen, keep time, close.

Owns the daemon's life; every part is one call down. Runs on one event loop, which never waits for a disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from torch_watchdog.daemon.alerts_service import AlertsService
from torch_watchdog.daemon.audit import Audit
from torch_watchdog.daemon.calls import Calls
from torch_watchdog.daemon.config import DaemonConfig
from torch_watchdog.daemon.counters import Counters
from torch_watchdog.daemon.disk import DiskReader, PastList
from torch_watchdog.daemon.grants import Grants
from torch_watchdog.daemon.ingest import Ingest
from torch_watchdog.daemon.journal import AtTerminal, Journal, Listeners
from torch_watchdog.daemon.keeping import keeping
from torch_watchdog.daemon.listen import bind, new_server
from torch_watchdog.daemon.query_service import QueryService
from torch_watchdog.daemon.renewal import Renewal
from torch_watchdog.daemon.services import ControlService, TelemetryService
from torch_watchdog.daemon.view import FleetView
from torch_watchdog.errors import DaemonStartError
from torch_watchdog.store.background import BackgroundWriter
from torch_watchdog_proto.v1 import alerts_pb2_grpc, control_pb2_grpc, query_pb2_grpc, telemetry_pb2_grpc

if TYPE_CHECKING:
    from torch_watchdog.daemon.alerting import Alerting
    from torch_watchdog.store.fleet import FleetStore
    from torch_watchdog.store.index import BlockIndex

__all__ = ["run_daemon"]

_LONGEST_SLEEP_S = 1.0
_STOP_GRACE_S = 0.5  # for calls under way
_FLUSH_S = 10.0  # for what is still to be written


async def run_daemon(config: DaemonConfig, *, listening: Callable[[tuple[str, ...]], None], say: Callable[[str], None]) -> None:
    """Serves until cancelled. `listening` gets the addresses once they answer. Raises DaemonStartError where it cannot listen."""
    wake = asyncio.Event()
    clock = steady_clock()
    renewal = None if config.certificate is None else Renewal(config.certificate, say=say)
    counters, grants = Counters(started_s=clock()), Grants(config.token, config.tokens_file, now=time.time)
    log = say if config.audit_file is not None else _quiet
    with _store(config, say) as (writer, index, store), contextlib.closing(DiskReader(config.runs_dir)) as disk:
        async with _alerting(config, writer, store, clock, say, log) as alerting:
            teller = AtTerminal(say) if config.audit_file is None else Journal(say)
            listeners = Listeners(*(() if alerting is None else (alerting,)), teller)
            ingest = Ingest(config, writer=writer, clock=clock, changed=wake.set, counters=counters, listener=listeners, store=store)
            audit = Audit(config.audit_file, writer=writer, now=clock, say=say)
            elsewhere = None if store is None else store.elsewhere
            calls = Calls(grants=grants, counters=counters, audit=audit, say=log)
            view = FleetView(
                ingest=ingest, clock=clock, counters=counters, ready=lambda: _unready(ingest), alerting=alerting, audit=audit,
                disk=disk, past=PastList(config.runs_dir, disk, elsewhere), elsewhere=elsewhere,
                store_away_s=lambda: 0.0 if store is None else store.mirror.away_s,
            )  # fmt: skip
            async with (
                _serving(config, view, index, calls, renewal) as addresses,
                _web(config, view, grants, renewal, say) as pages,
                keeping(config, ingest, alerting, store, problem=view.ready, say=say),
            ):
                if alerting is not None:
                    alerting.is_at(addresses)
                listening((*addresses, *pages))
                await _keep_time(ingest, wake, clock, alerting)


def _quiet(_: str) -> None:
    """The terminal of a launch is its user's: what happens at all hours is told by a daemon that keeps an audit log."""


def steady_clock() -> Callable[[], float]:
    """Seconds since the epoch that never go back, whatever is done to the system's clock meanwhile."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


@contextlib.contextmanager
def _store(config: DaemonConfig, say: Callable[[str], None]) -> Any:
    writer = BackgroundWriter(max_pending=config.max_pending_writes, say=say)
    index = _open_index(config)
    if config.index_file is not None and index is None:
        say(f"the index {config.index_file} cannot be opened: looking up steps takes longer, nothing else changes")
    store = _open_store(config, say)
    try:
        yield writer, index, store
    finally:
        if not writer.close(_FLUSH_S):
            say(f"the run directory did not take the last records within {_FLUSH_S:g} s: they are lost")
        if store is not None and not store.close(_FLUSH_S):
            say("the store did not take the last records: they are in the run directories, and are brought when this daemon is back")
        if index is not None:
            index.close()


@contextlib.asynccontextmanager
async def _alerting(
    config: DaemonConfig,
    writer: BackgroundWriter,
    store: FleetStore | None,
    clock: Callable[[], float],
    say: Callable[[str], None],
    log: Callable[[str], None],
) -> AsyncIterator[Alerting | None]:
    """None where nobody is to be told."""
    if config.alerts is None or not config.alerts.receivers:
        yield None
        return
    from torch_watchdog.daemon.alerting import Alerting  # here, because most launches alert nobody

    alerting = Alerting(config.alerts, config.runs_dir, writer=writer, clock=clock, say=say, log=log, store=store)
    async with alerting.running():
        yield alerting


def _open_store(config: DaemonConfig, say: Callable[[str], None]) -> FleetStore | None:
    """Raises StoreError: a daemon that cannot reach it at its start cannot know which jobs are its own."""
    if config.store_url is None:
        return None
    from torch_watchdog.store.fleet import FleetStore  # here, for SQLAlchemy's sake, too

    return FleetStore(config.store_url, config.runs_dir, say=say, lease_s=config.lease_s)


def _open_index(config: DaemonConfig) -> BlockIndex | None:
    if config.index_file is None:
        return None
    # Here, because SQLAlchemy takes longer to load than all the rest, and a launch has no index.
    from torch_watchdog.store.index import BlockIndex

    return BlockIndex.open(config.index_file)


@contextlib.asynccontextmanager
async def _serving(
    config: DaemonConfig, view: FleetView, index: BlockIndex | None, calls: Calls, renewal: Renewal | None
) -> AsyncIterator[tuple[str, ...]]:
    server = new_server(config.max_message_bytes)
    ingest = view.ingest
    telemetry_pb2_grpc.add_TelemetryServicer_to_server(TelemetryService(ingest, calls), server)
    control_pb2_grpc.add_ControlServicer_to_server(ControlService(ingest, calls), server)
    query_pb2_grpc.add_QueryServicer_to_server(QueryService(view, calls, index=index), server)
    alerts_pb2_grpc.add_AlertsServicer_to_server(AlertsService(view.alerting, calls), server)
    addresses = tuple(bind(server, address, token=config.token, renewal=renewal) for address in config.listen)
    await server.start()
    try:
        yield addresses
    finally:
        await calls.all_ended(config.linger_s)
        await calls.end_all()
        await server.stop(_STOP_GRACE_S)
        ingest.close()


@contextlib.asynccontextmanager
async def _web(
    config: DaemonConfig, view: FleetView, grants: Grants, renewal: Renewal | None, say: Callable[[str], None]
) -> AsyncIterator[tuple[str, ...]]:
    """The page's URL; nothing where none is asked for."""
    if config.web is None:
        yield ()
        return
    from torch_watchdog.web.access import Access  # here, because a launch without a page must not wait for a web server to load
    from torch_watchdog.web.app import make_app
    from torch_watchdog.web.server import serving_web

    access = Access.by_grants(Grants(config.web_token, now=time.time) if config.web_token else grants, clock=view.clock)
    app = make_app(view, access, tls=renewal is not None)
    async with contextlib.AsyncExitStack() as stack:
        urls: tuple[str, ...] = ()
        try:
            urls = (await stack.enter_async_context(serving_web(app, config.web, request_s=config.web_request_s, renewal=renewal)),)
        except DaemonStartError as error:
            if not config.web_optional:
                raise
            say(f"no page for this launch: {error}")
        if view.alerting is not None and urls:
            view.alerting.page_url = view.alerting.page_url or urls[0]
        yield urls


def _unready(ingest: Ingest) -> str | None:
    return "the run directories cannot be written: records are being dropped" if ingest.is_dropping_writes else None


async def _keep_time(ingest: Ingest, wake: asyncio.Event, clock: Callable[[], float], alerting: Alerting | None) -> None:
    """Ticks when a deadline has come; wakes early where an event has brought a nearer one."""
    while True:
        ingest.tick()
        if alerting is not None:
            alerting.tick(ingest.jobs)
        wake.clear()
        deadline = ingest.next_deadline()
        sleep_s = _LONGEST_SLEEP_S if deadline is None else min(_LONGEST_SLEEP_S, max(0.01, deadline - clock()))
        with contextlib.suppress(TimeoutError):
            # Not wait_for: before Python 3.12 it loses a cancellation that comes together with the event.
            async with asyncio.timeout(sleep_s):
                await wake.wait()
