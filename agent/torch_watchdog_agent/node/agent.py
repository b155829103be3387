"""START HERE for the node process: its thread and its event loop. What runs on the loop is `work.py`.

Owns the thread and the time that its end may take. Knows nothing of rings, ranks or gRPC.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable

from torch_watchdog_agent.node.config import JobOutcome, NodeConfig
from torch_watchdog_agent.node.work import NodeWork
from torch_watchdog_proto.loops import quiet_grpc_noise

__all__ = ["NodeAgent"]

_START_TIMEOUT_S = 20.0
_SILENT_S = 2.0
_CLOSE_TIMEOUT_S = 3.0


class NodeAgent:
    """Speaks for the ranks of one node. All of it runs in one thread with its own event loop."""

    def __init__(self, config: NodeConfig, *, say: Callable[[str], None]) -> None:
        """`say` gets one line for the terminal, with its `[torch-watchdog]` prefix; it is called from the agent's thread."""
        self._config = config
        self._say_line = say
        self._ready: concurrent.futures.Future[tuple[NodeWork, asyncio.AbstractEventLoop]] = concurrent.futures.Future()
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="torch-watchdog-node", daemon=True)

    def start(self) -> None:
        """Opens `runtime_dir/control.sock`, then begins to read rings and to report. Returns once the socket listens, so that ranks can be started.

        Raises OSError where it cannot listen.
        """
        self._thread.start()
        self._ready.result(_START_TIMEOUT_S)

    def signal_ranks(self, number: int) -> None:
        """Sends the signal to every rank of this node that is connected."""
        self._on_loop(lambda work: work.signal_ranks(number))

    def asked_to_end(self, number: int) -> None:
        """The launch got this signal now, and passes it on."""
        time_ns = time.time_ns()
        self._on_loop(lambda work: work.asked_to_end(number, time_ns))

    def stopped_s(self) -> float | None:
        """For how long all ranks of this node have been gone on an order to all of the job; None where that is not so."""
        return self._ready.result(timeout=0)[0].stopped_s() if self._ready.done() and self._thread.is_alive() else None

    def ranks_at_work(self) -> int:
        """How many ranks of this node live and have an order to carry out: to save, most of all."""
        return self._ready.result(timeout=0)[0].ranks_at_work() if self._ready.done() and self._thread.is_alive() else 0

    def ranks_to_go_on(self) -> tuple[int, ...]:
        """The pids of this node's ranks that live, and do not end by themselves."""
        return self._ready.result(timeout=0)[0].ranks_to_go_on() if self._ready.done() and self._thread.is_alive() else ()

    def _on_loop(self, call: Callable[[NodeWork], None]) -> None:
        """Nothing where the agent has not begun yet, or has ended."""
        if self._ready.done() and self._thread.is_alive():
            work, loop = self._ready.result(timeout=0)
            loop.call_soon_threadsafe(call, work)

    def finish(self, exit_code: int, signal: int | None = None, *, timeout_s: float = 10.0) -> JobOutcome:
        """Call once the wrapped command has ended: reads what the rings still hold, reports it, asks the daemon how the job ended.

        Returns within `timeout_s` (and a moment), whatever the daemon does; then with `exit_code=None` and a line that says what is missing.
        """
        work, loop = self._ready.result(timeout=0)
        if not self._thread.is_alive():
            return JobOutcome(exit_code=None, lines=("the node agent had ended before the command did: what was found is not known here",))
        try:
            ending = asyncio.run_coroutine_threadsafe(work.end(exit_code, signal), loop)
            return self._waited_for(ending, timeout_s)
        except (TimeoutError, concurrent.futures.CancelledError):
            line = f"the daemon did not answer within {timeout_s:g} s: the last records are missing, and what it found is not known here"
            return work.last_words.outcome(exit_code, why=line)
        except Exception as error:  # noqa: BLE001 - the command has ended, and must end as it did
            return work.last_words.outcome(exit_code, why=f"the node agent failed ({error}): what the daemon found is not known here")
        finally:
            self._close(loop)

    def _waited_for(self, ending: concurrent.futures.Future[JobOutcome], timeout_s: float) -> JobOutcome:
        """Whoever looks at a terminal that does nothing is told why."""
        if timeout_s <= _SILENT_S:
            return ending.result(timeout_s)
        try:
            return ending.result(_SILENT_S)
        except TimeoutError:
            self._say(f"the command has ended; the daemon does not answer, and is waited for up to {timeout_s:g} s")
            return ending.result(timeout_s - _SILENT_S)

    def _say(self, line: str) -> None:
        self._say_line(f"[torch-watchdog] {line}")

    def _close(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._stop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:  # noqa: BLE001 - start() raises it, or the terminal gets a line
            if self._ready.done():
                self._say(f"the node agent has failed ({error}): the training goes on, unwatched")
            else:
                self._ready.set_exception(error)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(quiet_grpc_noise)
        self._stop = asyncio.Event()
        work = NodeWork(self._config, say=self._say)
        await work.open()
        self._ready.set_result((work, loop))
        try:
            await self._stop.wait()
        finally:
            await work.close()
