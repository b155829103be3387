"""The pages over real HTTP, without a browser: what they show, to whom, and that the user's data stays text."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
from fleet_harness import BAD_TOKEN, Fleet, until

from torch_watchdog.web import pages
from torch_watchdog_proto import messages as m

EVIL = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


class Elements(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.scripts: list[str | None] = []
        self.names: set[str] = set()
        self.handlers: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.scripts += [dict(attrs).get("src")] if tag == "script" else []
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def running_job(fleet: Fleet, violation: m.Violation = BAD_TOKEN, **more: str) -> None:
    node = fleet.node(**more)
    node.rank(0, 1)
    node.steps(0, 0, 1, 2)
    node.say(m.Noticed(rank=0, step=3, micro_step=0, violation=violation))
    until(lambda: fleet.incidents())


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", ("job", "running")),
        ("jobs/job", ("Job job", "Save a checkpoint", "batch.index_out_of_range", "Ranks and time")),
        ("jobs/job/incidents/1", ("input_ids[2,7] = 70, allowed 0..63", "Look at rank 0")),
        ("jobs/job/ranks/0", ("Step by step", "Newest steps")),
        ("jobs/job/ranks/0?step=2", ("The batch of step 2",)),
    ],
)
def test_a_page_shows_what_it_is_for(fleet: Fleet, path: str, words: tuple[str, ...]) -> None:
    running_job(fleet)
    answer = fleet.get(path)
    assert answer.status_code == 200 and [word for word in words if word not in answer.text] == []


@pytest.mark.parametrize(
    "path", ["jobs/nobody", "jobs/job/incidents/9", "jobs/job/ranks/77", "jobs/nobody/ranks/0", "jobs/nobody/incidents/1"]
)
def test_what_is_not_there_is_a_page_that_says_so(fleet: Fleet, path: str) -> None:
    running_job(fleet)
    answer = fleet.get(path)
    assert answer.status_code == 404 and "<h1>Not here</h1>" in answer.text


@pytest.mark.parametrize(("path", "status"), [("jobs/nobody/heat", 404), ("jobs/job/heat?metric=x", 400), ("jobs/job/heat?first=-1", 400)])
def test_a_wrong_question_to_the_map_is_refused(fleet: Fleet, path: str, status: int) -> None:
    running_job(fleet)
    assert fleet.get(path).status_code == status


def test_the_map_has_what_was_reported(fleet: Fleet) -> None:
    running_job(fleet)
    shown = fleet.get("jobs/job/heat?metric=step").json()
    assert shown["rows"] == [{"label": "rank 0", "first": 0, "last": 0}] and 2.0 in shown["cells"][0]


def test_an_incidents_page_says_nothing_twice(fleet: Fleet) -> None:
    running_job(fleet)
    page = fleet.get("jobs/job/incidents/1").text
    lines = (re.sub(r"<[^>]+>", "", line).strip() for line in page.splitlines() if line.startswith(("<p", "<tr", "<h")))
    said = [line for line in lines if line]
    assert len(said) == len(set(said)) and page.count("input_ids[2,7] is 70") == 1 and page.count("<p>f</p>") == 1


@pytest.mark.parametrize("path", ["favicon.ico", "apple-touch-icon.png", "apple-touch-icon-120x120-precomposed.png", "robots.txt"])
def test_what_browsers_ask_for_by_themselves_is_answered_without_a_login(fleet: Fleet, path: str) -> None:
    answer = httpx.get(f"{fleet.url}{path}")
    assert (answer.status_code, answer.text) in ((204, ""), (200, "User-agent: *\nDisallow: /\n"))


def test_the_users_data_stays_text_on_every_page(fleet: Fleet) -> None:
    evil = dataclasses.replace(
        BAD_TOKEN, summary=EVIL, cause=EVIL, fix=EVIL, batch=m.BatchFact(key=EVIL, element=(0,), value=EVIL),
        bound=m.BoundFact(low=0, high=1, op=EVIL, module=EVIL, source=EVIL),
    )  # fmt: skip
    running_job(fleet, evil, node=EVIL)
    for path in (
        "",
        "jobs/job",
        f"jobs/job?said={EVIL}",
        "jobs/job/incidents/1",
        "jobs/job/ranks/0",
        f"jobs/{EVIL}",
        "jobs/job/ranks/0?step=2",
    ):
        found = Elements(fleet.get(path).text)
        assert "img" not in found.names and found.handlers == [] and set(found.scripts) <= {"/static/job.js"}, path


def test_an_order_from_the_page_is_given_and_told(fleet: Fleet) -> None:
    running_job(fleet)
    answer = fleet.http.post("jobs/job/orders", data={"kind": "order.checkpoint"})
    assert answer.status_code == 303
    assert 'role="status">every rank is told' in fleet.get(answer.headers["location"].lstrip("/")).text
    assert "there is no such order" in httpx.URL(fleet.http.post("jobs/job/orders", data={"kind": "rm"}).headers["location"]).params["said"]


def test_another_sites_form_gives_no_order(fleet: Fleet) -> None:
    running_job(fleet)
    refused = fleet.http.post("jobs/job/orders", data={"kind": "order.stop"}, headers={"origin": "https://evil.example"})
    assert refused.status_code == 403


def test_the_stream_tells_what_is_new_until_it_is_left(fleet: Fleet) -> None:
    running_job(fleet)
    with fleet.http.stream("GET", "jobs/job/live") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        first = next(line for line in lines if line.startswith("data: "))
        assert json.loads(first[6:])["last_step"] == 2
        fleet.nodes[0].steps(0, 3, 4)
        assert json.loads(next(line for line in lines if line.startswith("data: "))[6:])["last_step"] == 4


def test_no_more_pages_are_followed_than_the_daemon_bears(fleet: Fleet) -> None:
    running_job(fleet)
    streams = [fleet.http.stream("GET", "jobs/job/live") for _ in range(65)]
    answers = [stream.__enter__() for stream in streams]
    assert [answer.status_code for answer in answers].count(200) == 64 and answers[-1].status_code == 503
    for stream in streams:
        stream.__exit__(None, None, None)


def test_what_a_page_loads_is_small_and_of_this_daemon() -> None:
    static = Path(pages.__file__).parent.parent / "static"
    assert sum(path.stat().st_size for path in static.iterdir()) < 60_000
    assert not [
        path
        for path in static.iterdir()
        if "http:" in path.read_text().replace("http://www.w3.org/2000/svg", "") or "https:" in path.read_text()
    ]


def test_pages_leave_the_daemon_as_they_found_it(fleet: Fleet) -> None:
    running_job(fleet)
    before = threading.active_count()
    for _ in range(20):
        fleet.get("jobs/job")
    assert threading.active_count() <= before + 2
