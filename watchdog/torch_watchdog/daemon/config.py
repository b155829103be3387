"""What a daemon is told at its start.

Owns one dataclass; knows nothing of sockets or files: the launcher or `watchdog serve` fills it in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["DaemonConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    """Job J's files are `runs_dir/J`. `listen` holds `unix:PATH` (in a folder that only this user can enter) and `HOST:PORT` (0: any free port).

    `index_file` None: no SQLite index. `token` is asked of every caller where it is not empty; a port needs one.
    `web`: HOST:PORT of the page, the JSON API and the metrics; None: not served. `web_token`: what it asks for in place of `token`.
    `web_optional`: where it cannot be served, that is said and the daemon works without it.
    `linger_s`: how long the end waits for nodes that still have to say goodbye.
    """

    runs_dir: Path
    listen: tuple[str, ...]
    index_file: Path | None = None
    token: str = field(default="", repr=False)
    web: str | None = None
    web_token: str = field(default="", repr=False)
    web_optional: bool = False
    web_request_s: float = 10.0  # for a request to arrive whole
    grace_s: float = 300.0
    linger_s: float = 0.0
    max_message_bytes: int = 8 << 20
    max_pending_writes: int = 2_000
    max_ended_jobs: int = 200
