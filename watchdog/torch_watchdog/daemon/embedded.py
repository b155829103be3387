"""The daemon inside another process: a thread with its own event loop, for the launcher.

Owns the thread. Whatever happens in it, leaving the context takes bounded time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Self

from torch_watchdog.daemon.config import DaemonConfig
from torch_watchdog.daemon.main import run_daemon
from torch_watchdog.errors import DaemonStartError
from torch_watchdog.launch.say import say as say_on_terminal
from torch_watchdog_proto.loops import quiet_grpc_noise

__all__ = ["EmbeddedDaemon"]

_START_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 15.0


class EmbeddedDaemon:
    """Context manager: inside it the daemon answers at `addresses`. Leaving it flushes the store, in bounded time."""

    def __init__(self, config: DaemonConfig, *, say: Callable[[str], None] = say_on_terminal) -> None:
        """`say` gets lines for the terminal, without the prefix; from the daemon's thread."""
        self._config = config
        self._say = say
        self._listening: Future[tuple[str, ...]] = Future()
        self._stop: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="torch-watchdog-daemon", daemon=True)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it listens, in the order of `config.listen`, with the real port where 0 was asked for; then the URL of the page, where one is served."""
        return self._listening.result(timeout=0)

    def __enter__(self) -> Self:
        """Returns once it listens. Raises DaemonStartError."""
        self._thread.start()
        try:
            self._listening.result(_START_TIMEOUT_S)
        except TimeoutError as error:
            reason = f"it was not ready within {_START_TIMEOUT_S:g} s"
            raise DaemonStartError(self._config.listen[0], reason, "Is this machine overloaded?") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()
        self._thread.join(_STOP_TIMEOUT_S + self._config.linger_s)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:  # noqa: BLE001 - the launcher must learn of it, now or by a line
            self._failed(error)

    async def _serve(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        loop.set_exception_handler(quiet_grpc_noise)
        if task is not None:
            self._stop = lambda: _call(loop, task.cancel)
        try:
            await run_daemon(self._config, listening=self._listening.set_result, say=self._say)
        except asyncio.CancelledError:
            pass  # that was us

    def _failed(self, error: Exception) -> None:
        if self._listening.done():
            self._say(f"the daemon has failed ({error}): the training goes on, unwatched")
        else:
            self._listening.set_exception(error)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        pass  # the loop has ended by itself
