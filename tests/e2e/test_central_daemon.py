"""A central daemon on one machine, a launch on another (network namespaces): certificates, tokens with roles, a bad sample, who may see and who may answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from launching import Ended, ended, launch, script, torchrun, until, watchdog
from machines import Machine, can_make_machines, machines

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not can_make_machines(), reason="machines are network namespaces: this needs root and `ip netns`"),
]

DAEMON = "node0:9470"


@dataclass
class Site:
    """`home` is the daemon's machine, `away` the one that trains; `folder` holds what an operator has made."""

    home: Machine
    away: Machine
    folder: Path

    def here(self, *words: str) -> str:
        done = launch(self.folder, watchdog(*words))
        assert done.code == 0, done.err
        return done.out.strip()

    def token(self, name: str, *words: str) -> Path:
        kept = self.folder / f"{name}.token"
        kept.write_text(self.here("token", "add", name, *words, "--tokens", str(self.folder / "tokens.json")))
        kept.chmod(0o600)
        return kept

    def from_away(self, token: Path, *command: str, authority: Path | None = None) -> Ended:
        known = {"TORCH_WATCHDOG_TOKEN_FILE": str(token), "TORCH_WATCHDOG_CA_FILE": str(authority or self.folder / "certs" / "ca.crt")}
        folder = self.folder / "away"
        return ended(self.away.start(folder, list(command), **known), folder)

    def ask(self, token: Path, *words: str, authority: Path | None = None) -> Ended:
        return self.from_away(token, *watchdog(*words, "--daemon", DAEMON), authority=authority)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with machines(tmp_path, 2) as (home, away):
        made = Site(home, away, tmp_path)
        for authority in ("certs", "others"):
            made.here("certs", "--out", str(tmp_path / authority), "node0", "10.77.0.1")
        (tmp_path / "own.token").write_text("o" * 43)
        made.token("seed", "--role", "viewer")
        command = watchdog(
            "serve", "--host", "node0", "--web", "node0:9471", "--dir", str(tmp_path / "runs"), "--tokens", str(tmp_path / "tokens.json")
        )
        files = ("--cert", str(tmp_path / "certs" / "daemon.crt"), "--key", str(tmp_path / "certs" / "daemon.key"))
        alert = ("--alert", "pagerduty://KEY@127.0.0.1:9")  # nobody is there
        serving = home.start(tmp_path / "home", [*command, *files, *alert], TORCH_WATCHDOG_TOKEN_FILE=str(tmp_path / "own.token"))
        try:
            until(lambda: "page and API at https://" in (tmp_path / "home" / "err").read_text(), "the daemon serves", 60)
            yield made
        finally:
            serving.terminate()
            serving.wait(30)


def test_a_launch_on_another_machine_is_watched_over_tls_and_seen_by_whose_token_fits(site: Site) -> None:
    team = site.token("team-a", "--role", "agent", "--job", "team-a-*")
    other = site.token("team-b", "--role", "agent", "--job", "team-b-*")
    anna = site.token("anna", "--role", "operator")
    trained = torchrun(*script("train.py", "--bad", 38))
    run = site.from_away(team, *watchdog("--daemon", DAEMON, "--job", "team-a-nightly"), *trained)
    assert run.code == 65, run.err
    assert "rank 1" in run.err and "dataset sample 38" in run.err and "cannot be reached" not in run.err
    seen = site.ask(team, "incidents", "team-a-nightly", "--json")
    (incident,) = json.loads(seen.out)["incidents"]
    assert incident["kind"] == "batch.index_out_of_range" and incident["action"]["exit_code"] == 65
    assert "is not for job" in site.ask(other, "incidents", "team-a-nightly").err
    assert "may not order" in site.ask(team, "ack", "team-a-nightly/1").err
    assert site.ask(anna, "ack", "team-a-nightly/1").out == "team-a-nightly/1 is yours\n"
    (alert,) = json.loads(site.ask(anna, "alert", "list", "--json").out)["alerts"]
    assert alert["acknowledged_by"] == "anna"
    silence = ("alert", "silence", "--job", "team-b-*", "--for", "2h", "--comment", "move")
    assert site.ask(anna, *silence).code == 0
    listed = site.ask(anna, "alert", "list").out.splitlines()
    assert (
        "anna" in listed[1]
        and listed[-2].startswith("kept quiet: jobs")
        and listed[-1].split()[0] == "team-b-*"
        and listed[-1].endswith("move")
    )
    foreign = site.ask(team, "status", "team-a-nightly", authority=site.folder / "others" / "ca.crt")
    assert foreign.code != 0 and "TORCH_WATCHDOG_CA_FILE must name the ca.crt of that daemon" in foreign.err
    log = (site.folder / "home" / "err").read_text()
    assert "job team-a-nightly: begins" in log and "job team-a-nightly: ended, exit code 65, 1 incident" in log
    assert "acknowledgement of team-a-nightly/1 by anna" in log


def test_a_launch_without_findings_ends_with_what_was_done_as_far_as_its_token_sees(site: Site) -> None:
    trained = torchrun(*script("train.py", "--epochs", 1))
    for token, words in (
        (site.token("team-a", "--role", "agent", "--job", "team-a-*"), "2 ranks, 8 steps (8 updates), nothing found (exit code 0)"),
        (site.token("cluster", "--role", "agent"), "2 ranks, nothing found (exit code 0)"),
    ):
        run = site.from_away(token, *watchdog("--daemon", DAEMON, "--job", f"team-a-{token.stem}"), *trained)
        assert run.code == 0 and run.err.splitlines()[-1] == f"[torch-watchdog] job team-a-{token.stem}: {words}", run.err


def test_a_launch_that_the_daemon_refuses_trains_on_and_says_why(site: Site) -> None:
    other = site.token("team-b", "--role", "agent", "--job", "team-b-*")
    run = site.from_away(other, *watchdog("--daemon", DAEMON, "--job", "team-a-nightly"), *torchrun(*script("train.py", "--epochs", 1)))
    assert run.code == 0 and "is not for job 'team-a-nightly'" in run.err and "the training goes on without it" in run.err
    plain = site.from_away(other, "curl", "-sS", "-m", "5", "http://node0:9471/healthz")
    trusting = site.from_away(other, "curl", "-fsS", "--cacert", str(site.folder / "certs" / "ca.crt"), "https://node0:9471/healthz")
    assert plain.code != 0 and trusting.out == "ok\n"
