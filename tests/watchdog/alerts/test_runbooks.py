"""Whoever is told of an incident finds a page on what to do about its kind."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from fleet_harness import Fleet

REPO = Path(__file__).resolve().parents[3]
SCHEMA = json.loads((REPO / "proto" / "torch_watchdog_proto" / "incident.schema.json").read_text())
KINDS = [*SCHEMA["properties"]["kind"]["enum"], "watchdog.job_silent"]


def test_every_kind_has_its_page_and_no_other_page_is_there() -> None:
    assert sorted(path.stem for path in (REPO / "docs" / "runbooks").glob("*.md")) == sorted(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_says_whose_it_is_and_what_to_do(kind: str) -> None:
    text = (REPO / "docs" / "runbooks" / f"{kind}.md").read_text()
    assert text.startswith(f"# {kind}\n")
    assert "**Whose:**" in text and "**Exit code:**" in text and "\n1. " in text


def test_the_daemon_serves_them_without_a_token_because_they_tell_nothing_of_any_job(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        assert httpx.get(f"{fleet.url}runbooks/rank.hang").text.startswith("# rank.hang\n")
        page = httpx.get(f"{fleet.url}runbooks/rank.hang", headers={"accept": "text/html"})
        assert page.headers["content-type"].startswith("text/html") and "<h1>rank.hang</h1>" in page.text and "<ol>" in page.text
        for path in ("nothing", "..%2fapp.py", "rank.hang.md"):
            assert httpx.get(f"{fleet.url}runbooks/{path}").status_code == 404
