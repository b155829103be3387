"""The gRPC service of the person on call: which alerts are open, this one is mine, keep quiet about those.

Owns no state. Where the daemon alerts nobody, it says so.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import grpc

from torch_watchdog.alerts.routes import Match
from torch_watchdog.daemon.calls import Calls, checked
from torch_watchdog.daemon.grants import OWNER, told_as
from torch_watchdog_proto import codec
from torch_watchdog_proto.envelopes import OrderAnswer
from torch_watchdog_proto.v1 import alerts_pb2, alerts_pb2_grpc

if TYPE_CHECKING:
    from torch_watchdog.daemon.alerting import Alerting

__all__ = ["AlertsService"]

_LONGEST_SILENCE_S = 30 * 86_400.0


class AlertsService(alerts_pb2_grpc.AlertsServicer):  # type: ignore[misc]
    """One method a question."""

    def __init__(self, alerting: Alerting | None, calls: Calls) -> None:
        self._alerting, self.calls = alerting, calls

    @checked("look")
    async def ListAlerts(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002 - gRPC's names
        alerting = await self._there(context)
        grant = self.calls.grant(context)
        alerts = [] if grant is None else alerting.listed(grant.fits)
        silences = [] if grant is None else alerting.silences(grant.fits)
        return alerts_pb2.ListAlertsAnswer(alerts_json=list(map(json.dumps, alerts)), silences_json=list(map(json.dumps, silences)))

    @checked("order")
    async def Acknowledge(self, request: Any, context: Any) -> Any:  # noqa: N802
        alerting = await self._there(context)
        self.calls.check_job(context, request.incident.partition("/")[0] if "/" in request.incident else "*")
        taken = alerting.acknowledge(request.incident, told_as(self._who(context), request.by)[:200])
        text = f"{request.incident} is yours" if taken else await _not_open(alerting, request.incident)
        self._note(context, "acknowledgement", request.incident, request.by, accepted=taken)
        return codec.plain_message(OrderAnswer(accepted=taken, text=text))

    @checked("order")
    async def Silence(self, request: Any, context: Any) -> Any:  # noqa: N802
        alerting = await self._there(context)
        if not 0 < request.seconds <= _LONGEST_SILENCE_S:
            raise codec.MalformedMessageError(f"a silence lasts more than 0 and at most {_LONGEST_SILENCE_S:.0f} s")
        for job in request.jobs or ("*",):
            self.calls.check_job(context, job)
        match = Match(jobs=tuple(request.jobs), kinds=tuple(request.kinds), severities=tuple(request.severities))
        alerting.silence(match, request.seconds, told_as(self._who(context), request.by)[:200], request.comment[:500])
        self._note(context, "silence", _what(match, request.seconds), request.by, accepted=True, reason=request.comment)
        return codec.plain_message(OrderAnswer(accepted=True, text=f"nothing of that is told for {request.seconds:.0f} s"))

    def _note(self, context: Any, what: str, target: str, says: str, *, accepted: bool, reason: str = "") -> None:
        self.calls.audit.note(what, target, who=self._who(context), says=says, accepted=accepted, reason=reason)

    def _who(self, context: Any) -> str:
        return (self.calls.grant(context) or OWNER).name

    async def _there(self, context: Any) -> Alerting:
        if self._alerting is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this daemon alerts nobody: start it with --alert URL")
        assert self._alerting is not None  # noqa: S101 - abort has raised
        return self._alerting


async def _not_open(alerting: Alerting, incident: str) -> str:
    at = await alerting.told_by(incident.partition("/")[0])
    advice = "see `watchdog alert list`" if at is None else f"the daemon {at} tells of that job, and its message says where it is asked"
    return f"no open alert is called {incident[:120]!r} here: {advice}"


def _what(match: Match, seconds: float) -> str:
    kinds, severities = (
        f", {name} {' '.join(found)}" if found else "" for name, found in (("kinds", match.kinds), ("severities", match.severities))
    )
    return f"jobs {' '.join(match.jobs) or '*'}{kinds}{severities} for {seconds:.0f} s"
