"""What a daemon is told at its start.

Owns one dataclass; knows nothing of sockets or files: the launcher or `watchdog serve` fills it in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch_watchdog.alerts.routes import Match, Route, Silence

__all__ = ["AlertsConfig", "Certificate", "DaemonConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertsConfig:
    """Whom to tell: `receivers` are URLs by name, and hold secrets.

    `silent_s`: a node that is gone so long without a goodbye is told of. `last_words`: this daemon ends with its job, so that what is open then must be
    told to last. `restores_all`: it is the one daemon of all jobs in its folder. `public_url` is where a person reaches the page, `runbook_url` may hold
    `{kind}`. `exit_codes`: ours, as the one launch of this daemon has them.
    """

    receivers: Mapping[str, str] = field(default_factory=dict, repr=False)
    routes: tuple[Route, ...] = ()
    silences: tuple[Silence, ...] = ()
    resend_s: float = 60.0
    silent_s: float = 120.0
    public_url: str | None = None
    runbook_url: str | None = None
    last_words: bool = False
    restores_all: bool = False
    exit_codes: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def to_all(
        cls, urls: tuple[str, ...], *, last_words: bool = False, restores_all: bool = False, exit_codes: Mapping[int, int] | None = None
    ) -> AlertsConfig:  # fmt: skip
        """Everything to everybody, as a launch has it."""
        receivers = {f"{number}-{url.partition('://')[0]}": url for number, url in enumerate(urls, 1)}
        routes = (Route(match=Match(), to=tuple(receivers)),)
        return cls(receivers=receivers, routes=routes, last_words=last_words, restores_all=restores_all, exit_codes=exit_codes or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Of a daemon that is reached from other machines: PEM files."""

    certificate_file: Path
    key_file: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    """Job J's files are `runs_dir/J`. `listen` holds `unix:PATH` (in a folder that only this user can enter) and `HOST:PORT` (0: any free port).

    `index_file` None: no SQLite index. `token` is asked of every caller where it is not empty; a port needs one.
    `tokens_file`: more tokens than `token`, with roles and jobs (grants.py). `certificate`: what ports that leave the machine show, in place of
    one made from `token`; the page's, too. `audit_file` gets a line for each order.
    `web`: HOST:PORT of the page, the JSON API and the metrics; None: not served. `web_token`: what it asks for in place of `token`.
    `web_optional`: where it cannot be served, that is said and the daemon works without it.
    `store_url`: the database that several daemons share; it may hold a password. `retention_s`: what nobody has written to for so long is removed.
    `heartbeat_url` is told every `heartbeat_s` that the daemon is there. `max_jobs` may run at once; nodes wait where
    their job sends more than `reports_per_s`.
    `linger_s`: how long the end waits for nodes that still have to say goodbye.
    """

    runs_dir: Path
    listen: tuple[str, ...]
    index_file: Path | None = None
    token: str = field(default="", repr=False)
    tokens_file: Path | None = None
    audit_file: Path | None = None
    certificate: Certificate | None = None
    web: str | None = None
    web_token: str = field(default="", repr=False)
    web_optional: bool = False
    web_request_s: float = 10.0  # for a request to arrive whole
    alerts: AlertsConfig | None = None
    store_url: str | None = field(default=None, repr=False)
    lease_s: float = 12.0  # a daemon that is silent for so long has lost its jobs to those that share the store
    retention_s: float | None = None
    heartbeat_url: str | None = field(default=None, repr=False)
    heartbeat_s: float = 60.0
    max_jobs: int | None = None
    reports_per_s: float | None = None
    grace_s: float = 300.0
    linger_s: float = 0.0
    max_message_bytes: int = 8 << 20
    max_pending_writes: int = 2_000
    max_ended_jobs: int = 200
