"""The settings file of `watchdog serve`: who is told of what, how long things are kept, how much a job may ask of the daemon.

Owns the file's words and what each may be; every error names file, place and what was expected, and shows no URL, because those hold secrets. What
comes out is checked and frozen.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torch_watchdog.alerts.alert import JOB_SILENT
from torch_watchdog.alerts.receivers import receiver_of
from torch_watchdog.alerts.routes import Match, Route, Silence
from torch_watchdog.daemon.config import AlertsConfig
from torch_watchdog.errors import ConfigError
from torch_watchdog.store.shapes import incident_schema

__all__ = ["ServeSettings", "duration_s", "kinds_of_nothing", "load_settings"]

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_SEVERITIES = ("warning", "critical")
_MATCH = ("jobs", "kinds", "severities")
_MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """`alerts` None: the file names no receiver. `heartbeat_url` is told every `heartbeat_s` that the daemon is there."""

    alerts: AlertsConfig | None = None
    silences: tuple[Silence, ...] = ()
    store_url: str | None = field(default=None, repr=False)
    retention_s: float | None = None
    heartbeat_url: str | None = field(default=None, repr=False)
    heartbeat_s: float = 60.0
    max_jobs: int | None = None
    reports_per_s: float | None = None


def load_settings(path: Path) -> ServeSettings:
    """Raises ConfigError."""
    table = _Table(str(path), _read(path))
    receivers = {name: _receiver(name, url) for name, url in table.take("receivers", _table_of_texts, {}).items()}
    routes = tuple(_route(one, receivers) for one in table.tables("routes"))
    silences = tuple(_silence(one) for one in table.tables("silences"))
    if receivers and not routes:
        routes = (Route(match=Match(), to=tuple(receivers)),)
    quotas = table.table("quotas")
    found = ServeSettings(
        alerts=AlertsConfig(
            receivers=receivers, routes=routes, restores_all=True, silent_s=table.take("silent_after", duration_s, 120.0),
            resend_s=table.take("resend_every", duration_s, 60.0), public_url=table.take("public_url", _http_url, None),
            runbook_url=table.take("runbook_url", _http_url, None), silences=silences,
        ) if receivers else None,
        silences=silences,
        store_url=table.take("store", _store_url, None),
        retention_s=table.take("keep", duration_s, None),
        heartbeat_url=table.take("heartbeat", _http_url, None),
        heartbeat_s=table.take("heartbeat_every", duration_s, 60.0),
        max_jobs=quotas.take("jobs", _count, None),
        reports_per_s=quotas.take("reports_per_second_of_a_job", _positive, None),
    )  # fmt: skip
    quotas.nothing_else()
    table.nothing_else()
    return found


def kinds_of_nothing(settings: ServeSettings) -> tuple[str, ...]:
    """A sentence for each pattern of a kind that no alert can ever fit: a typing error, or a kind of a newer version."""
    known = (*incident_schema()["properties"]["kind"]["enum"], JOB_SILENT)
    routes = [(f"routes {number}", one.match) for number, one in enumerate(settings.alerts.routes if settings.alerts else (), 1)]
    silences = [(f"silences {number}", one.match) for number, one in enumerate(settings.silences, 1)]
    return tuple(
        f"{where}, kinds: {pattern!r} fits no kind that this version knows, as {known[0]} or rank.*"
        for where, match in (*routes, *silences)
        for pattern in match.kinds
        if not any(fnmatchcase(kind, pattern) for kind in known)
    )


class _Table:
    """A table of the file, whose words are taken one by one; what is left at the end is none of ours."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where, self._left, self._known = where, dict(values), list[str]()

    def take(self, name: str, check: Callable[[Any], Any], default: Any) -> Any:
        self._known.append(name)
        if name not in self._left:
            return default
        try:
            return check(self._left.pop(name))
        except ValueError as error:
            raise ConfigError(f"{self.where}, {name}", str(error)) from None

    def table(self, name: str) -> _Table:
        return _Table(f"{self.where}, {name}", self.take(name, _a_table, {}))

    def tables(self, name: str) -> tuple[_Table, ...]:
        return tuple(_Table(f"{self.where}, {name} {number}", one) for number, one in enumerate(self.take(name, _list_of_tables, []), 1))

    def nothing_else(self) -> None:
        if self._left:
            raise ConfigError(self.where, f"unknown setting {next(iter(self._left))!r}; known are {', '.join(self._known)}")


def _read(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.loads(file.read(_MAX_FILE_BYTES).decode("utf-8"))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"is not TOML ({error})") from error


def _receiver(name: str, url: str) -> str:
    receiver_of(name, url)
    return url


def _match(table: _Table) -> Match:
    return Match(**{name: table.take(name, _severities if name == "severities" else _texts, ()) for name in _MATCH})


def _route(table: _Table, receivers: Mapping[str, str]) -> Route:
    def names(value: Any) -> tuple[str, ...]:
        found = _texts(value)
        unknown = next((name for name in found if name not in receivers), None)
        if unknown is not None:
            raise ValueError(f"there is no receiver {unknown!r}; known are {', '.join(receivers) or 'none'}")
        return found

    match = _match(table)
    route = Route(
        match=match, to=table.take("to", names, ()), escalate_after_s=table.take("escalate_after", duration_s, None),
        escalate_to=table.take("escalate_to", names, ()),
    )  # fmt: skip
    table.nothing_else()
    if (route.escalate_after_s is None) != (not route.escalate_to):
        raise ConfigError(table.where, "escalate_after and escalate_to belong together: after how long, and to whom")
    return route


def _silence(table: _Table) -> Silence:
    silence = Silence(
        match=_match(table), until_s=table.take("until", _time, None) or 0.0, by="settings", comment=table.take("comment", _text, "")
    )
    table.nothing_else()
    if not silence.until_s:
        raise ConfigError(table.where, "until when? Write until = 2026-12-01T08:00:00Z")
    return silence


# What each may be. Each raises ValueError with what was expected.


def duration_s(value: Any) -> float:
    """`90s`, `15m`, `2h`, `30d`."""
    found = re.fullmatch(r"([0-9]{1,6})([smhd])", value) if isinstance(value, str) else None
    if found is None or not int(found[1]):
        raise ValueError("must be a number and s, m, h or d, as 90s, 15m or 2h")
    return int(found[1]) * _UNITS_S[found[2]]


def _a_table(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("must be a table, as [quotas]")  # noqa: TRY004 - what every check raises
    return value


def _list_of_tables(value: Any) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ValueError("must be tables, each beginning with its name in [[ ]]")
    return value


def _table_of_texts(value: Any) -> Mapping[str, str]:
    if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
        raise ValueError('must be lines such as pager = "pagerduty://KEY"')
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
        raise ValueError('must be a list of texts, as ["prod-*"]')
    return tuple(value)


def _severities(value: Any) -> tuple[str, ...]:
    found = _texts(value)
    if not set(found) <= set(_SEVERITIES):
        raise ValueError(f"must be of {', '.join(_SEVERITIES)}")
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError("must be a text of one line")
    return value


def _http_url(value: Any) -> str:
    parts = urlsplit(value) if isinstance(value, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be a URL that begins with https:// or http://")
    return str(value)


def _store_url(value: Any) -> str:
    from torch_watchdog.store.database import check_store_url

    check_store_url(_text(value))
    return str(value)


def _time(value: Any) -> float:
    if not isinstance(value, datetime):
        raise ValueError("must be a date and time, as 2026-12-01T08:00:00Z")  # noqa: TRY004
    return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()


def _count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError("must be a whole number, 1 or more")
    return value


def _positive(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < 1e9:
        raise ValueError("must be a number greater than 0")
    return float(value)
