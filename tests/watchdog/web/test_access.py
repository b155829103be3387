"""Who is let in, who may order, and what every answer carries."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import httpx
import pytest
from fleet_harness import TOKEN, Fleet, until

from torch_watchdog.errors import DaemonStartError
from torch_watchdog.web.access import Access, Role


@pytest.mark.parametrize("path", ["", "metrics", "api/v1/jobs", "api/v1/openapi.json", "nothing/here"])
@pytest.mark.parametrize(
    "header", [{}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {TOKEN}"}, {"cookie": "torch-watchdog-session=x"}]
)
def test_nothing_of_a_job_is_shown_without_the_token(fleet: Fleet, path: str, header: dict[str, str]) -> None:
    answer = httpx.get(fleet.url + path, headers=header)
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["healthz", "readyz"])
def test_a_prober_needs_no_token(fleet: Fleet, path: str) -> None:
    assert httpx.get(fleet.url + path).text == "ok\n"


def test_a_browser_logs_in_by_token_and_out_again(fleet: Fleet) -> None:
    with httpx.Client(base_url=fleet.url, headers={"accept": "text/html"}) as browser:
        for page in ("/", "/jobs/job"):
            asked = browser.get(page)
            assert asked.status_code == 303 and asked.headers["location"] == f"/login?next={page}"
            assert "form" in browser.get(asked.headers["location"]).text
        assert browser.post("login", data={"token": "wrong"}).status_code == 403
        let_in = browser.post("login?next=/jobs/job", data={"token": TOKEN})
        assert let_in.status_code == 303 and let_in.headers["location"] == "/jobs/job"
        cookie = let_in.headers["set-cookie"].lower()
        assert "httponly" in cookie and "samesite=strict" in cookie and TOKEN not in cookie
        assert browser.get("/api/v1/jobs").json() == {"jobs": []}
        assert browser.post("logout").status_code == 303
        assert browser.get("/").status_code == 303
        late = browser.post("logout")
        assert late.status_code == 303 and late.headers["location"] == "/login", "a button of a page whose session has ended meanwhile"


@pytest.mark.parametrize("accept", ["text/html", "*/*", "application/json", "text/html, image/gif, image/jpeg, *; q=.2, */*; q=.2"])
@pytest.mark.parametrize(("method", "path"), [("GET", "api/v1/jobs"), ("POST", "api/v1/jobs/job/orders"), ("GET", "metrics")])
def test_a_program_never_takes_the_login_page_for_an_answer(fleet: Fleet, method: str, path: str, accept: str) -> None:
    answer = httpx.request(method, fleet.url + path, headers={"accept": accept}, follow_redirects=True)
    assert answer.status_code == 401 and "error" in answer.json()


@pytest.mark.parametrize("target", ["//evil.example/x", "https://evil.example/", "/\\evil.example", "evil", "javascript:alert(1)"])
def test_the_login_sends_nobody_to_another_site(fleet: Fleet, target: str) -> None:
    answer = httpx.post(fleet.url + "login", params={"next": target}, data={"token": TOKEN})
    assert answer.headers["location"] == "/"


def test_another_sites_page_cannot_give_orders(fleet: Fleet) -> None:
    with httpx.Client(base_url=fleet.url) as browser:
        browser.post("login", data={"token": TOKEN})
        for header in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}, {"origin": "null"}):
            refused = browser.post("api/v1/jobs/job/orders", json={"kind": "order.stop"}, headers=header)
            assert refused.status_code == 403
        own = browser.post("api/v1/jobs/job/orders", json={"kind": "order.stop"}, headers={"origin": fleet.url.rstrip("/")})
        assert own.status_code == 404  # let in: there is no such job


def test_every_answer_carries_the_strict_headers(fleet: Fleet) -> None:
    for answer in (fleet.get(""), fleet.get("healthz"), fleet.get("nothing"), httpx.get(fleet.url), httpx.get(fleet.url + "login")):
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"
        assert answer.headers["cache-control"] == "no-store"
        assert "server" not in answer.headers


def test_a_large_body_is_refused_by_its_length_and_without_one(fleet: Fleet) -> None:
    assert fleet.http.post("login", content=b"x" * 70_000).status_code == 413
    with pytest.raises(httpx.HTTPError):
        fleet.http.post("api/v1/jobs/job/orders", content=iter([b"x" * 50_000] * 4)).raise_for_status()


def test_a_caller_who_does_not_finish_its_request_is_let_go(tmp_path: Path) -> None:
    with Fleet(tmp_path, web_request_s=0.3) as fleet:
        host, port = fleet.url.removeprefix("http://").rstrip("/").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as slow:
            began = time.monotonic()
            slow.sendall(b"GET / HTTP/1.1\r\n")
            assert slow.recv(100) == b""
            assert time.monotonic() - began < 5
        assert fleet.get("healthz").status_code == 200


def test_what_was_refused_is_counted(fleet: Fleet) -> None:
    httpx.get(fleet.url + "metrics")
    httpx.post(fleet.url + "login", data={"token": "wrong"})
    text = fleet.get("metrics").text
    assert 'torch_watchdog_refused_calls_total{reason="http_no_token"} 1.0' in text
    assert 'torch_watchdog_refused_calls_total{reason="http_wrong_token"} 1.0' in text


def test_a_viewer_looks_and_does_not_order() -> None:
    clock = [0.0]
    access = Access({"v": Role.VIEWER, "o": Role.OPERATOR}.get, clock=lambda: clock[0])
    session = access.begin_session("v")
    assert session is not None and access.role_of_session(session) is Role.VIEWER
    assert access.begin_session("nobody") is None
    clock[0] = 13 * 3600.0
    assert access.role_of_session(session) is None


@pytest.mark.parametrize("address", ["0.0.0.0:0", "10.0.0.1:80", "here", "127.0.0.1:99999"])
def test_a_page_is_not_served_off_this_host_or_nowhere(tmp_path: Path, address: str) -> None:
    with pytest.raises(DaemonStartError), Fleet(tmp_path, web=address):
        pass


def test_a_launch_goes_on_without_its_page_where_the_port_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        fleet = Fleet(tmp_path, web=f"127.0.0.1:{taken.getsockname()[1]}", web_optional=True)
        with fleet.daemon:
            assert len(fleet.daemon.addresses) == 1
    until(lambda: fleet.said)
    assert fleet.said[0].startswith("no page for this launch: ")
