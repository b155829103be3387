"""How quick the pages of a large job are, after an hour of steps: `python tests/bench/pages.py [RANKS]`, in a real Chromium.

The job is made up (its ranks report to the map as a daemon's ingest does), the application, its server and the browser are real. Prints one JSON
object: seconds on the server for each answer and its bytes, and milliseconds until the browser shows it. Median of some visits.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS), str(TESTS / "browser")]

from browsing import Browser, browser  # noqa: E402

from torch_watchdog.daemon.counters import Counters  # noqa: E402
from torch_watchdog.web.access import Access, Role  # noqa: E402
from torch_watchdog.web.app import make_app  # noqa: E402
from torch_watchdog.web.server import serving_web  # noqa: E402
from torch_watchdog_proto.envelopes import JobStatus, RankStatus  # noqa: E402
from torch_watchdog_proto.messages import NodeReport, StepBlock, StepTable  # noqa: E402

TOKEN, PER_NODE, HOUR_S, STEPS_A_REPORT = "a-token-of-the-benchmark", 8, 3_600, 20
VISITS = 5


class MadeUp:
    """What the pages ask of a daemon, for one large job."""

    def __init__(self, ranks: int) -> None:
        self.num_ranks, self.now_s = ranks, 0.0
        self.counters, self.alerting, self.ingest = Counters(started_s=0.0), None, SimpleNamespace(observers=[])
        known = tuple(
            RankStatus(
                rank=rank,
                node=_node(rank),
                pid=rank,
                phase="train",
                alive=True,
                last_step=HOUR_S,
                loss=1.5,
                step_time_s=0.9,
                last_seen_s=0.0,
            )
            for rank in range(ranks)
        )
        nodes = tuple(_node(rank) for rank in range(0, ranks, PER_NODE))
        self._status = JobStatus(
            job="big", state="running", policy="stop", attempt=0, world_size=ranks, run_dir="/r", started_s=1.0, nodes=nodes, ranks=known
        )

    def clock(self) -> float:
        return self.now_s

    def job(self, name: str) -> JobStatus:
        return self._status

    def run_dir(self, name: str) -> Path:
        return Path("/r")

    def is_live(self, name: str) -> bool:
        return name == "big"

    def incidents(self, name: str) -> tuple[Any, ...]:
        return ()

    async def newest_blocks(self, run_dir: Path, rank: int) -> tuple[StepBlock, ...]:
        return tuple(_block(rank, step) for step in range(0, HOUR_S, STEPS_A_REPORT))

    def train_for_an_hour(self) -> None:
        reports = [
            (_node(first), NodeReport(seq=1, time_ns=1, steps=StepTable.of([_block(rank, 0) for rank in range(first, first + PER_NODE)])))
            for first in range(0, self.num_ranks, PER_NODE)
        ]
        while self.now_s < HOUR_S:
            for node, report in reports:
                for observe in self.ingest.observers:
                    observe("big", node, report)
            self.now_s += STEPS_A_REPORT


def _node(rank: int) -> str:
    return f"node-{rank // PER_NODE}"


def _block(rank: int, first: int) -> StepBlock:
    steps = tuple(range(first, first + STEPS_A_REPORT))
    same: Callable[[Any], tuple[Any, ...]] = lambda value: (value,) * len(steps)  # noqa: E731
    return StepBlock(
        rank=rank, attempt=0, pid=rank + 1, first_record=1, micro_step=same(0), micro_of_step=steps, micro_time_ns=steps, loader_ns=same(2_000_000 + rank),
        loss=same(1.5 + rank % 7), loss_known=same(True), evaluation=same(False), forward_ns=same(3 * 10**8), step=steps, step_time_ns=steps,
        step_ns=same(9 * 10**8 + rank * 1000), vetoed=same(False),
    )  # fmt: skip


def served(view: MadeUp) -> str:
    """The address of the real application, in a thread of its own until the end of the process."""
    app = make_app(view, Access(lambda token: Role.OPERATOR if token == TOKEN else None, clock=time.monotonic), tls=False)  # type: ignore[arg-type]
    address: list[str] = []
    is_up = threading.Event()

    async def serve() -> None:
        async with serving_web(app, "127.0.0.1:0", request_s=30.0) as url:
            address.append(url)
            is_up.set()
            await asyncio.Event().wait()

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
    assert is_up.wait(30)
    return address[0]


def answers(url: str) -> dict[str, Any]:
    client = httpx.Client(base_url=url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=60)
    found = {}
    for name, path in {
        "job page": "jobs/big", "map of all ranks": "jobs/big/heat?metric=step", "map of 8 ranks": "jobs/big/heat?metric=step&first=0&last=7",
        "rank page": "jobs/big/ranks/5?step=7",
    }.items():  # fmt: skip
        took = []
        for _ in range(VISITS):
            began = time.perf_counter()
            answer = client.get(path)
            took.append(time.perf_counter() - began)
            assert answer.status_code == 200, answer.text[:300]
        found[name] = {"seconds": round(statistics.median(took), 3), "bytes": len(answer.content)}
    return found


def shown(url: str) -> dict[str, float]:
    """Milliseconds, as a person meets them."""
    times: dict[str, list[float]] = {}
    with browser() as page:
        page.open(f"{url}login?token={TOKEN}&next=/jobs/big")
        for _ in range(VISITS):
            page.open(f"{url}jobs/big")
            times.setdefault("first paint of the job's page", []).append(page.first_paint_ms())
            page.until(lambda: _rows(page) > 0, "the map")
            times.setdefault("the whole map is drawn", []).append(page.run("return performance.now()"))
            choose = "document.getElementById('metric').value = 'loss'; metric.dispatchEvent(new Event('change'))"
            times.setdefault("another metric", []).append(_ms(page, choose))
            times.setdefault("into a row of nodes", []).append(_ms(page, "location.hash = '#ranks-0-63'"))
            page.open(f"{url}jobs/big/ranks/5")
            times.setdefault("first paint of a rank's page", []).append(page.first_paint_ms())
    return {name: round(statistics.median(found), 1) for name, found in times.items()}


def _rows(page: Browser) -> int:
    return int(page.run("return document.querySelectorAll('#rows tbody tr').length"))


def _ms(page: Browser, action: str) -> float:
    """From the action until the table of rows is another one."""
    script = """
    const done = arguments[arguments.length - 1], began = performance.now(), rows = document.querySelector('#rows tbody');
    new MutationObserver((_, watching) => { watching.disconnect(); done(performance.now() - began); }).observe(rows, { childList: true });
    """
    return float(page.driver.execute_async_script(script + action))


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 16_384
    view = MadeUp(ranks)
    url = served(view)
    began = time.process_time()
    view.train_for_an_hour()
    print(json.dumps({
        "ranks": ranks, "cpu seconds to take an hour of steps in": round(time.process_time() - began, 1), "server": answers(url), "browser ms": shown(url),
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
