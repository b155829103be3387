"""What a node process does for a rescue: lets keepers go, reads telling lines, counts what the kernel killed."""

from __future__ import annotations

from pathlib import Path

from torch_watchdog_agent.holdback import released_file
from torch_watchdog_agent.node.keepers import LOST_PATIENCE_S, Keepers
from torch_watchdog_agent.node.logs import RankLogs
from torch_watchdog_agent.node.memory import OomKills
from torch_watchdog_proto.envelopes import TellRank
from torch_watchdog_proto.messages import Leave


def test_keepers_go_when_the_daemon_has_been_away_for_a_moment(tmp_path: Path) -> None:
    keepers, file = Keepers(tmp_path), released_file(tmp_path, attempt=0, rank=1)
    keepers.ended(0, 1)
    keepers.without_a_daemon(LOST_PATIENCE_S / 2)
    assert not file.exists()
    keepers.without_a_daemon(LOST_PATIENCE_S)
    assert file.exists()


def test_ranks_that_were_freed_are_let_go_once_when_nobody_is_left_to_tell_them_more(tmp_path: Path) -> None:
    keepers = Keepers(tmp_path)
    keepers.freed(1, 3, generation=7)
    assert keepers.without_a_daemon(LOST_PATIENCE_S / 2) == ()
    assert keepers.without_a_daemon(LOST_PATIENCE_S) == (TellRank(attempt=1, rank=3, order=Leave(generation=7)),)
    assert keepers.without_a_daemon(LOST_PATIENCE_S) == ()


def test_only_what_is_new_and_telling_is_read_and_never_an_earlier_attempts(tmp_path: Path) -> None:
    log, logs = tmp_path / "rank-0.log", RankLogs(tmp_path)
    logs.begin(0)
    assert logs.look(0) == []
    log.write_text("step 1\nx.cu:1: k: block: [0,0,0], thread: [0,0,0] Assertion `i < n` failed.\n")
    assert len(logs.look(0)) == 1
    assert logs.look(0) == []
    with log.open("a") as file:
        file.write("terminate called after throwing\n")
    logs.begin(0)
    assert logs.look(0) == []


def test_kills_of_this_container_are_counted_from_now_on(tmp_path: Path) -> None:
    cgroup, root = tmp_path / "cgroup", tmp_path / "fs"
    cgroup.write_text("0::/job\n")
    (root / "job").mkdir(parents=True)
    events = root / "job" / "memory.events"
    events.write_text("oom 1\noom_kill 1\n")
    kills = OomKills(cgroup_file=cgroup, root=root)
    assert kills.new() == 0
    events.write_text("oom 2\noom_kill 3\n")
    assert (kills.new(), kills.new()) == (2, 0)


def test_without_a_cgroup_nothing_is_known(tmp_path: Path) -> None:
    assert OomKills(cgroup_file=tmp_path / "none", root=tmp_path).new() == 0
