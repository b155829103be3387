"""How a launch ended, where no daemon was there to be told: a note in the folder of its runs, which the next launch there hands in.

Owns these notes. Without them a job that ended well while its daemon was away looks like one that died: the daemon that comes back pages somebody. A note
is handed in within a bounded time or kept for the next launch; a training never waits for it longer than that.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_watchdog.daemon.client import DaemonClient
from torch_watchdog.errors import DaemonUnreachableError, WatchdogError
from torch_watchdog.store.run_directory import write_json
from torch_watchdog_proto import __version__
from torch_watchdog_proto.messages import NodeGoodbye, NodeHello

__all__ = ["PATIENCE_S", "hand_in", "leave_note"]

_FOLDER = ".unsaid"
_NEWS_S = 86_400.0
PATIENCE_S = 5.0  # for all of them


def leave_note(runs_dir: Path, daemon: str, hello: NodeHello, goodbye: NodeGoodbye) -> None:
    """Raises OSError."""
    who = {name: getattr(hello, name) for name in ("job", "node", "policy", "run_dir", "nodes", "session", "rendezvous")}
    end = {"exit_code": goodbye.exit_code, "signal": goodbye.signal}
    write_json(runs_dir / _FOLDER / f"{hello.job}.goodbye", {"daemon": daemon, "hello": who, "goodbye": end}, mode=0o600)


def hand_in(runs_dir: Path, daemon: str, client: Callable[[], DaemonClient]) -> None:
    """The notes for this daemon. What it refuses is kept, for it may be at another one for now; what is a day old is news to nobody."""
    until_s = time.monotonic() + PATIENCE_S
    for note in sorted((runs_dir / _FOLDER).glob("*.goodbye")):
        if time.monotonic() >= until_s:
            return
        try:
            if time.time() - note.stat().st_mtime < _NEWS_S and not _handed_in(note, daemon, client):
                continue
        except DaemonUnreachableError:
            return
        except (WatchdogError, OSError):
            continue  # refused, or another launch was faster
        except (ValueError, TypeError, KeyError):
            pass  # none of ours
        with contextlib.suppress(OSError):
            note.unlink()
            note.parent.rmdir()


def _handed_in(note: Path, daemon: str, client: Callable[[], DaemonClient]) -> bool:
    """False where it is for another daemon."""
    found: dict[str, Any] = json.loads(note.read_text(encoding="utf-8"))
    if found["daemon"] != daemon:
        return False
    with client() as line:
        line.goodbye(NodeHello(version=__version__, command=(), **found["hello"]), NodeGoodbye(**found["goodbye"]))
    return True
