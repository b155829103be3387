"""Those who are told: a URL becomes a receiver, a delivery becomes a call.

Owns the network. A receiver's URL holds secrets, so only its name is ever shown. An answer that says no is an error with its sentence; what to do
about it (try again, later each time) is the desk's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import SplitResult, unquote, urlsplit

from torch_watchdog.alerts import alertmanager, pagerduty
from torch_watchdog.alerts.alert import Delivery
from torch_watchdog.alerts.open import Rules
from torch_watchdog.alerts.text import said
from torch_watchdog.errors import AlertError, ConfigError
from torch_watchdog.threads import Threads
from torch_watchdog_proto.address import is_loopback

if TYPE_CHECKING:
    import httpx

__all__ = ["Receiver", "check_url", "posting_client", "receiver_of"]

_TIMEOUT_S = 10.0
_ALERTMANAGER_RESEND_S = 60.0
_APPRISE_TITLE_CHARS, _APPRISE_THREADS = 200, 4


class Receiver(Protocol):
    """`send` returns what was answered, in a few words, or raises AlertError."""

    name: str
    rules: Rules

    async def send(self, delivery: Delivery) -> str: ...

    async def close(self) -> None: ...


def check_url(url: str) -> str:
    """The scheme. Raises ValueError in words, without the URL: it holds secrets."""
    parts = urlsplit(url)
    if parts.scheme == "pagerduty" and not parts.netloc:
        raise ValueError("pagerduty:// needs the integration's key: pagerduty://KEY")
    if parts.scheme in ("alertmanager", "alertmanagers") and not parts.hostname:
        raise ValueError("alertmanager:// needs a host: alertmanager://HOST:PORT")
    if not parts.scheme or "://" not in url:
        raise ValueError("must be a URL such as pagerduty://KEY, alertmanager://HOST:PORT, slack://... or mailto://...")
    return parts.scheme


def receiver_of(name: str, url: str, *, resend_s: float = _ALERTMANAGER_RESEND_S) -> Receiver:
    """Raises ConfigError where the URL is none that anybody here can tell."""
    try:
        scheme, parts = check_url(url), urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"alert receiver {name}", str(error)) from None
    if scheme == "pagerduty":
        return _PagerDuty(name=name, parts=parts)
    if scheme in ("alertmanager", "alertmanagers"):
        return _Alertmanager(name=name, parts=parts, rules=Rules(resend_s=resend_s, per_minute=1_000))
    return _Apprise(name=name, url=url)


@dataclass(kw_only=True)
class _Http:
    """One JSON object a delivery."""

    name: str
    parts: SplitResult = field(repr=False)
    rules: Rules = field(default_factory=Rules)
    _client: httpx.AsyncClient | None = field(default=None, repr=False)

    async def _post(self, url: str, body: Any, **more: Any) -> str:
        import httpx  # here, because a launch without alerts must not wait for it

        self._client = self._client or posting_client()
        try:
            answer = await self._client.post(url, json=body, **more)
        except (httpx.HTTPError, OSError) as error:
            raise AlertError(self.name, f"did not answer ({_short(error)})") from error
        words = f"{answer.status_code} {answer.reason_phrase}"
        if not answer.is_success:
            raise AlertError(self.name, f"said {words}: {answer.text[:200]}")
        return words

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()


def posting_client() -> httpx.AsyncClient:
    import httpx

    return httpx.AsyncClient(timeout=_TIMEOUT_S, follow_redirects=False)


class _PagerDuty(_Http):
    """`pagerduty://KEY`, or `pagerduty://KEY@HOST` for another region or a relay."""

    async def send(self, delivery: Delivery) -> str:
        key, at, host = self.parts.netloc.rpartition("@")
        key, host = (key, host) if at else (host, pagerduty.DEFAULT_HOST)
        return await self._post(f"{_scheme_for(host)}://{host}/v2/enqueue", pagerduty.event(delivery, unquote(key)))


class _Alertmanager(_Http):
    """`alertmanager://[USER:PASSWORD@]HOST:PORT[/PREFIX]`; `alertmanagers://` speaks TLS."""

    async def send(self, delivery: Delivery) -> str:
        scheme = "https" if self.parts.scheme.endswith("s") else "http"
        host = self.parts.netloc.rpartition("@")[2]
        auth = {"auth": (unquote(self.parts.username), unquote(self.parts.password or ""))} if self.parts.username else {}
        url = f"{scheme}://{host}{self.parts.path.rstrip('/')}/api/v2/alerts"
        return await self._post(url, alertmanager.posted(delivery), **auth)


class _Apprise:
    """Any of the services that Apprise knows. It blocks, so it has threads of its own."""

    def __init__(self, *, name: str, url: str) -> None:
        import apprise  # here, because it takes longer to load than all of a launch

        self.name, self.rules = name, Rules(tells_past=True)
        self._threads = Threads("apprise", _APPRISE_THREADS)
        self._service = apprise.Apprise()
        if not self._service.add(url):
            raise ConfigError(
                f"alert receiver {name}", "is no URL that Apprise knows: see its list of services (a plain web hook is json://HOST/PATH)"
            )

    async def send(self, delivery: Delivery) -> str:
        message = _message(delivery)
        try:
            sent = await asyncio.wait_for(self._threads.run(lambda: self._service.notify(**message)), 3 * _TIMEOUT_S)
        except Exception as error:
            raise AlertError(self.name, f"failed ({type(error).__name__})") from error
        if not sent:
            raise AlertError(self.name, "did not take the message")
        return "taken"

    async def close(self) -> None:
        self._threads.close()


def _message(delivery: Delivery) -> Mapping[str, Any]:
    alert = delivery.alert
    words = {"resolve": "RESOLVED ", "acknowledge": f"{alert.acknowledged_by} has it: "}.get(
        delivery.action, "UPDATE " if delivery.again else ""
    )
    kind = {"resolve": "success", "acknowledge": "info"}.get(delivery.action, "failure" if alert.severity == "critical" else "warning")
    return {"title": f"{words}{alert.title}"[:_APPRISE_TITLE_CHARS], "body": "\n".join(said(delivery)), "notify_type": kind}


def _short(error: Exception) -> str:
    """Of a connection: none of the libraries' own words hold a URL."""
    return f"{type(error).__name__}: {str(error)[:120]}".rstrip(": ")


def _scheme_for(host: str) -> str:
    """A key goes over TLS, except to a relay on this very host."""
    return "http" if is_loopback(urlsplit(f"//{host}").hostname or "") else "https"
