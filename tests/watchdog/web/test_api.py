"""The JSON API over real HTTP: what it answers is what its OpenAPI document says."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from fleet_harness import BAD_TOKEN, Fleet, until
from openapi_spec_validator import validate

from torch_watchdog.web import api
from torch_watchdog_proto import messages as m


def schema_of(document: dict[str, Any], path: str, method: str, status: int) -> dict[str, Any]:
    found = document["paths"][path][method]["responses"][str(status)]["content"]["application/json"]["schema"]
    return {**found, "components": document["components"]}


def job_with_an_incident(fleet: Fleet) -> None:
    node = fleet.node()
    node.rank(0, 1)
    node.steps(0, 0, 1, 2)
    node.say(m.Noticed(rank=0, step=3, micro_step=0, violation=BAD_TOKEN))
    until(lambda: fleet.incidents())


def test_the_document_is_openapi_and_names_every_path_of_the_api(fleet: Fleet) -> None:
    document = fleet.get("api/v1/openapi.json").json()
    validate(document)
    assert {(path, method.upper()) for path, methods in document["paths"].items() for method in methods} == {
        (route.path, method) for route in api.routes() for method in (route.methods or ()) if method != "HEAD"
    }


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("/api/v1/jobs", "api/v1/jobs"),
        ("/api/v1/jobs/{job}", "api/v1/jobs/job"),
        ("/api/v1/jobs/{job}/incidents", "api/v1/jobs/job/incidents"),
        ("/api/v1/jobs/{job}/incidents/{incident}", "api/v1/jobs/job/incidents/1"),
        ("/api/v1/alerts", "api/v1/alerts"),
        ("/api/v1/jobs/{job}/events", "api/v1/jobs/job/events?after=0&limit=3"),
    ],
)
def test_an_answer_follows_its_schema(fleet: Fleet, path: str, url: str) -> None:
    job_with_an_incident(fleet)
    answer = fleet.get(url)
    assert answer.status_code == 200
    jsonschema.validate(answer.json(), schema_of(fleet.get("api/v1/openapi.json").json(), path, "get", 200))


def test_a_job_shows_its_ranks_and_the_list_does_not(fleet: Fleet) -> None:
    job_with_an_incident(fleet)
    assert [rank["last_step"] for rank in fleet.get("api/v1/jobs/job").json()["ranks"]] == [2]
    (listed,) = fleet.get("api/v1/jobs").json()["jobs"]
    assert listed["job"] == "job" and listed["incidents"] == 1 and "ranks" not in listed


@pytest.mark.parametrize("loss", ["nan", "inf", "-inf"])
def test_a_job_whose_loss_is_no_number_is_shown_and_says_so_in_a_word(fleet: Fleet, loss: str) -> None:
    """Such a number cannot be said in JSON: it had been an internal server error."""
    node = fleet.node()
    node.rank(0, 1)
    node.steps(0, 0, loss=float(loss))
    answer = fleet.get("api/v1/jobs/job")
    assert [rank["loss"] for rank in answer.json()["ranks"]] == [loss]
    jsonschema.validate(answer.json(), schema_of(fleet.get("api/v1/openapi.json").json(), "/api/v1/jobs/{job}", "get", 200))


def test_events_come_in_pages(fleet: Fleet) -> None:
    job_with_an_incident(fleet)

    def all_events() -> Any:
        return fleet.get("api/v1/jobs/job/events").json()["events"]

    until(lambda: any(event["kind"] == "incident" for event in all_events()))
    first = fleet.get("api/v1/jobs/job/events?limit=1").json()["events"]
    second = fleet.get(f"api/v1/jobs/job/events?limit=1&after={first[0]['order']}").json()["events"]
    assert [*first, *second] == all_events()[:2]


@pytest.mark.parametrize(
    ("url", "status", "word"),
    [
        ("api/v1/jobs/nobody", 404, "no job 'nobody'"),
        ("api/v1/jobs/nobody/events", 404, "no job 'nobody'"),
        ("api/v1/jobs/job/incidents/9", 404, "no incident '9'"),
        ("api/v1/jobs/job/events?limit=-1", 400, "`limit`"),
        ("api/v1/jobs/job/events?after=many", 400, "`after`"),
        ("api/v1/jobs/job/events?after=" + "9" * 30, 400, "`after`"),
        ("api/v1/jobs/..%2f..%2fetc", 404, ""),
    ],
)
def test_a_wrong_question_gets_its_sentence(fleet: Fleet, url: str, status: int, word: str) -> None:
    job_with_an_incident(fleet)
    answer = fleet.get(url)
    assert answer.status_code == status
    assert word in answer.text


def test_an_order_reaches_the_job(fleet: Fleet) -> None:
    node = fleet.node()
    refused = fleet.http.post("api/v1/jobs/job/orders", json={"kind": "order.stop"})
    assert refused.status_code == 409 and "no rank has reported" in refused.json()["text"]
    node.rank(0, 1)
    until(lambda: fleet.get("api/v1/jobs/job").json()["ranks"])
    taken = fleet.http.post("api/v1/jobs/job/orders", json={"kind": "order.checkpoint", "reason": "before the move"})
    assert taken.status_code == 202 and taken.json()["accepted"]
    assert [found["kind"] for found in fleet.incidents()] == ["order.checkpoint"]


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"kind": "order.explode"}', b"[" * 60_000, b"\xff"])
def test_an_order_that_is_none_is_refused(fleet: Fleet, body: bytes) -> None:
    fleet.node()
    assert fleet.http.post("api/v1/jobs/job/orders", content=body).status_code == 400
