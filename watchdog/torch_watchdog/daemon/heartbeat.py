"""A daemon's sign of life, sent to a service that pages when it stays away (healthchecks.io, Dead Man's Snitch, an Alertmanager's watchdog receiver).

Owns the one request every so often. It is left out while the daemon cannot do its work, so that a daemon that lives and does not work is paged, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from torch_watchdog.alerts.receivers import posting_client

__all__ = ["keep_beating"]


async def keep_beating(url: str, every_s: float, *, problem: Callable[[], str | None], say: Callable[[str], None]) -> None:
    """Until cancelled. The URL is a secret: it is not said."""
    import httpx  # here, because a launch has no heartbeat

    was_heard = True
    async with posting_client() as client:
        while True:
            if problem() is None:
                try:
                    is_heard = (await client.post(url, json={"service": "torch-watchdog"})).is_success
                except (httpx.HTTPError, OSError):
                    is_heard = False
                if is_heard != was_heard:
                    say(
                        "the heartbeat is heard again"
                        if is_heard
                        else "nobody takes this daemon's heartbeat: whoever waits for it is about to page"
                    )
                was_heard = is_heard
            await asyncio.sleep(every_s)
