"""What stands before every gRPC method: who calls and what that caller may do; and which calls are under way.

Owns tokens to grants to statuses. A refusal is counted by what was wrong, and said once a minute at most: a flood of them must not flood the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import grpc

from torch_watchdog.daemon.audit import Audit
from torch_watchdog.daemon.counters import Counters
from torch_watchdog.daemon.grants import OWNER, Grant, Grants, Power
from torch_watchdog.errors import (
    BadJobNameError,
    JobElsewhereError,
    JobForbiddenError,
    JobNameTakenError,
    JobWaitsForStoreError,
    SlowReaderError,
    TooManyJobsError,
    UnknownJobError,
    VersionSkewError,
    WatchdogError,
)
from torch_watchdog.phrases import as_our_fault
from torch_watchdog_proto import codec
from torch_watchdog_proto.envelopes import TOKEN_KEY

__all__ = ["Calls", "checked"]

_SAY_AGAIN_S = 60.0
_STATUS = {
    UnknownJobError: grpc.StatusCode.NOT_FOUND,
    JobNameTakenError: grpc.StatusCode.ALREADY_EXISTS,
    VersionSkewError: grpc.StatusCode.FAILED_PRECONDITION,
    BadJobNameError: grpc.StatusCode.INVALID_ARGUMENT,
    JobForbiddenError: grpc.StatusCode.PERMISSION_DENIED,
    JobElsewhereError: grpc.StatusCode.ABORTED,  # these: the node asks again
    JobWaitsForStoreError: grpc.StatusCode.ABORTED,
    TooManyJobsError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    SlowReaderError: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_NOT_TOLD = frozenset({"UnknownJobError", "JobElsewhereError", "TooManyJobsError"})  # ordinary answers


class Calls:
    """Every call under way, and what each caller may do. `say` gets a line for refusals, of each sort once a minute."""

    def __init__(self, *, grants: Grants, counters: Counters, audit: Audit, say: Callable[[str], None]) -> None:
        self.counters, self.audit = counters, audit
        self._grants, self._say = grants, say
        self._said_s: dict[str, float] = {}
        self._under_way: set[asyncio.Task[Any]] = set()

    def grant(self, context: Any) -> Grant | None:
        """What the caller may do; None where its token is none of ours."""
        if context.peer().startswith("unix:"):
            return OWNER  # its folder keeps others out
        return self._grants.of(str(dict(context.invocation_metadata() or ()).get(TOKEN_KEY, "")))

    def check_job(self, context: Any, job: str) -> None:
        """Raises JobForbiddenError."""
        grant = self.grant(context)
        if grant is None:
            raise JobForbiddenError(job, "a token that has ended")
        grant.check(job)

    def refused(self, why: str, context: Any, text: str) -> None:
        """Counts it, and tells the log who it was."""
        self.counters.refused_calls[f"grpc_{why}"] += 1
        now = time.monotonic()
        if why not in _NOT_TOLD and now - self._said_s.get(why, -_SAY_AGAIN_S) >= _SAY_AGAIN_S:
            self._said_s[why] = now
            self._say(f"refused a call of {context.peer()[:80]}: {text[:300]}")

    async def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Awaits the work of one call; None where `end_all` cut it short."""
        task = asyncio.create_task(work)
        self._under_way.add(task)
        try:
            await asyncio.wait((task,))
            return None if task.cancelled() else task.result()
        finally:
            self._under_way.discard(task)
            task.cancel()

    async def all_ended(self, timeout_s: float) -> None:
        """Returns once no call is under way, or after `timeout_s`."""
        if timeout_s > 0 and self._under_way:
            await asyncio.wait(tuple(self._under_way), timeout=timeout_s)

    async def end_all(self) -> None:
        """Ends them in order: gRPC itself would cut them off with a traceback on the terminal."""
        tasks = tuple(self._under_way)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def checked(power: Power) -> Callable[[Callable[..., Coroutine[Any, Any, Any]]], Callable[..., Awaitable[Any]]]:
    """Asks for a token that may do this, and answers our own errors with their sentence."""

    def decorate(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(method)
        async def call(self: Any, request: Any, context: Any) -> Any:
            calls: Calls = self.calls
            await _check_power(calls, context, power)
            try:
                return await calls.run(method(self, request, context))
            except codec.MalformedMessageError as error:
                calls.refused("malformed", context, str(error))
                await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error)[:500])
            except WatchdogError as error:
                calls.refused(type(error).__name__, context, str(error))
                await _abort(context, _STATUS.get(type(error), grpc.StatusCode.INTERNAL), _for_any_token(error)[:1000])
            except grpc.aio.BaseError:
                raise  # gRPC's own: the caller has gone, or was answered already
            except Exception as error:  # noqa: BLE001 - gRPC would tell the caller alone
                calls.refused("fault", context, text := as_our_fault(error))
                await _abort(context, grpc.StatusCode.INTERNAL, text[:1000])

        return call

    return decorate


def _for_any_token(error: WatchdogError) -> str:
    """Which other jobs there are is for whoever may see them."""
    return str(UnknownJobError(error.job, at=error.at) if isinstance(error, UnknownJobError) else error)


async def _abort(context: Any, status: grpc.StatusCode, text: str) -> None:
    """A caller that reads nothing is told when it reads on; one that has gone meanwhile is no error of ours."""
    with contextlib.suppress(grpc.aio.InternalError):
        await context.abort(status, text)


async def _check_power(calls: Calls, context: Any, power: Power) -> None:
    grant = calls.grant(context)
    if grant is None:
        given = dict(context.invocation_metadata() or ()).get(TOKEN_KEY)
        text = (
            f"this call brought {'another' if given else 'no'} token: the user who started the daemon has it on this machine, "
            "everybody else needs TORCH_WATCHDOG_TOKEN_FILE to name a file that holds it"
        )
        calls.refused("token", context, text)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, text)
    elif power not in grant.powers:
        needs = {"report": "agent", "look": "viewer or operator", "order": "operator"}[power]
        text = f"the token {grant.name!r} may not {power}: use one of the role {needs}"
        calls.refused("role", context, text)
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, text)
