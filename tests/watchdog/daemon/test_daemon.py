"""Node process and daemon on real sockets: what is told arrives once, orders come back, and each may die."""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import time
from collections import Counter
from dataclasses import replace

import pytest
from daemon_harness import HELLO, Place, kept_steps, kill, report, talk, until
from fleet_harness import BAD_TOKEN

from torch_watchdog.errors import DaemonUnreachableError, UnknownJobError
from torch_watchdog.store.read import read_blocks, read_events, read_incidents, read_reports
from torch_watchdog.store.run_directory import RunDirectory, write_json
from torch_watchdog_proto import messages as m
from torch_watchdog_proto.envelopes import GoodbyeAck, HelloAck, ReportAck

# Telemetry


def test_a_report_is_on_disk_when_it_is_acked(place: Place) -> None:
    with place.daemon():
        answers = talk(place.socket, HELLO, report(1, 0, 1), m.NodeGoodbye(exit_code=0))
        assert [type(answer) for answer in answers] == [HelloAck, ReportAck, GoodbyeAck]
        assert kept_steps(place.run_dir) == [0, 1]


def test_a_report_that_is_sent_again_changes_nothing_and_is_acked_again(place: Place) -> None:
    with place.daemon():
        talk(place.socket, HELLO, report(1, 0), report(2, 1), m.NodeGoodbye(exit_code=0))
        answers = talk(place.socket, HELLO, report(1, 0), report(2, 1), report(3, 2), m.NodeGoodbye(exit_code=0))
    assert answers[0].next_seq == 3
    assert [answer.seq for answer in answers[1:-1]] == [1, 2, 3]
    assert kept_steps(place.run_dir) == [0, 1, 2]


def test_a_daemon_that_was_started_anew_knows_what_it_had_acked(place: Place) -> None:
    with place.daemon():
        talk(place.socket, HELLO, report(1, 0), report(2, 1), m.NodeGoodbye(exit_code=0))
    with place.daemon():
        answers = talk(place.socket, HELLO, report(2, 1), report(3, 2), m.NodeGoodbye(exit_code=0))
        assert answers[0].next_seq == 3
        assert place.client().job("job").ranks[0].last_step == 2
    assert kept_steps(place.run_dir) == [0, 1, 2]


def test_nothing_is_doubled_and_nothing_lost_when_the_daemon_is_killed_in_the_middle(place: Place) -> None:
    process = place.daemon_process()
    node, ring = place.node(), place.ring()
    for step in range(400):
        ring.steps(step)
        if step in (100, 250):
            until(lambda: list(read_reports(place.run_dir)))
            kill(process)
        if step in (130, 300):
            process = place.daemon_process()
    until(lambda: len(kept_steps(place.run_dir)) == 400)
    outcome = node.finish(0)
    assert Counter(kept_steps(place.run_dir)) == Counter(range(400))
    assert outcome.exit_code is None and outcome.lines == ()
    assert any("cannot be reached" in line for line in place.said) == any("is back" in line for line in place.said)


def test_a_node_says_once_that_the_daemon_is_lost_and_once_that_it_is_back(place: Place) -> None:
    process = place.daemon_process()
    place.node()
    until(lambda: place.client().jobs())
    kill(process)
    until(lambda: place.said)
    attempts = time.monotonic() + 1.0
    until(lambda: time.monotonic() > attempts)
    assert len(place.said) == 1 and place.said[0].startswith("[torch-watchdog] ") and "training goes on" in place.said[0]
    place.daemon_process()
    until(lambda: len(place.said) == 2)
    assert "is back" in place.said[1] and "nothing was lost" in place.said[1]


def test_a_node_ends_in_bounded_time_without_a_daemon_and_says_what_is_missing(place: Place) -> None:
    node = place.node()
    place.ring().steps(0)
    begun = time.monotonic()
    outcome = node.finish(1, timeout_s=0.5)
    assert time.monotonic() - begun < 4
    assert outcome.exit_code is None and "did not answer" in outcome.lines[0]


# Control


def test_a_hold_travels_to_the_daemon_and_its_commit_to_every_rank(place: Place) -> None:
    with place.daemon():
        node = place.node()
        ranks = [place.rank(rank, world_size=2) for rank in (0, 1)]
        until(lambda: place.num_ranks() == 2)
        ranks[1].say(m.Hold(rank=1, step=5, micro_step=0, violation=BAD_TOKEN))
        for number, rank in enumerate(ranks):
            prepare = rank.order()
            assert isinstance(prepare, m.Prepare) and prepare.veto == 5
            rank.say(m.Ack(rank=number, generation=prepare.generation, passed=4))
        for number, rank in enumerate(ranks):
            commit = rank.order()
            assert isinstance(commit, m.Commit) and (commit.veto, commit.exit_code) == (5, 65)
            rank.say(m.Saved(rank=number, generation=1, updates_applied=5, path=commit.path))
        assert isinstance(ranks[0].order(), m.WriteCommitted)
        ranks[0].say(m.Committed(rank=0, generation=1))
        for number, rank in enumerate(ranks):
            assert rank.order() == m.Leave(generation=1, committed=True)
            rank.say(m.Left(rank=number, generation=1, updates_applied=5))
            rank.close()
        outcome = node.finish(0)
    assert outcome.exit_code == 65
    (incident,) = read_incidents(place.run_dir)
    assert incident == outcome.incidents[0]
    assert (incident["action"]["stopped_at_step"], incident["action"]["ranks_stopped"]) == (5, [0, 1])
    assert [event["order"] for event in read_events(place.run_dir)] == list(range(1, len(read_events(place.run_dir)) + 1))


def test_a_rank_that_says_its_last_words_as_the_command_ends_is_still_heard(place: Place) -> None:
    with place.daemon():
        node, rank = place.node(), place.rank(0)
        until(lambda: place.num_ranks() == 1)
        rank.say(m.Refused(rank=0, step=5, micro_step=0, violation=BAD_TOKEN))
        rank.close()
        assert node.finish(1).exit_code == 65


def test_a_daemon_that_comes_back_hears_the_ranks_hellos_again(place: Place) -> None:
    process = place.daemon_process()
    place.node()
    rank = place.rank(0)
    until(lambda: place.num_ranks() == 1)
    assert place.client().request("job", "order.checkpoint", by="ann").accepted
    first = rank.order()
    kill(process)
    place.daemon_process()
    until(lambda: place.num_ranks() == 1)  # what its node reports of it may come before its hello, and takes no order
    until(lambda: place.client().request("job", "order.stop", by="ann").accepted)
    second = rank.order()
    assert isinstance(second, m.Prepare) and second.generation > first.generation


def test_an_order_reaches_the_ranks_of_every_node(place: Place) -> None:
    other = place.root / "other"
    other.mkdir(mode=0o700)
    with place.daemon():
        nodes = [place.node(node="a", nodes=2), place.node(node="b", nodes=2, runtime_dir=other, ring_dir=other)]
        ranks = [place.rank(0, world_size=2), place.rank(1, world_size=2, runtime=other)]
        until(lambda: place.num_ranks() == 2)
        ranks[1].say(m.Hold(rank=1, step=5, micro_step=0, violation=BAD_TOKEN))
        assert [type(rank.order()) for rank in ranks] == [m.Prepare, m.Prepare]
        assert sorted(place.client().job("job").nodes) == ["a", "b"]
        nodes[0].finish(1)
        assert place.client().job("job").state != "ended"
        assert nodes[1].finish(1).exit_code == 65
        assert place.client().job("job").state == "ended"


def test_jobs_of_one_daemon_do_not_hear_each_other(place: Place) -> None:
    with place.daemon():
        talk(place.socket, HELLO, report(1, 0))
        talk(place.socket, replace(HELLO, job="other", session="another"), report(1, 7))
        assert [job.job for job in place.client().jobs()] == ["other", "job"]
        assert [place.client().job(name).ranks[0].last_step for name in ("job", "other")] == [0, 7]
    assert (kept_steps(place.run_dir), kept_steps(place.runs / "other")) == ([0], [7])


def test_a_killed_ranks_last_batch_is_kept_and_its_signal_named(place: Place) -> None:
    with place.daemon():
        node = place.node()
        ranks = [place.rank_process(rank) for rank in (0, 1)]
        until(lambda: place.num_ranks() == 2)
        ranks[1].send_signal(signal.SIGKILL)
        until(lambda: read_incidents(place.run_dir))
        ranks[0].send_signal(signal.SIGKILL)  # as the launcher does; both at once would be two that failed first
        outcome = node.finish(1)
    assert outcome.exit_code is None
    (incident,) = outcome.incidents
    assert (incident["kind"], len(incident["ranks_affected"])) == ("rank.died", 1)
    last = list(read_blocks(place.run_dir, rank=1))[-1]
    assert (last.micro_of_step[-1], last.loss_known[-1], last.tensors[0].key, last.tensors[0].high) == (5, False, "input_ids", (99.0,))
    assert list(place.rings.iterdir()) == []


def test_a_command_line_of_any_length_and_bytes_is_no_obstacle(place: Place) -> None:
    with place.daemon():
        node = place.node(command=("train", "x" * 200_000, "\udcff", *["y"] * 100_000))
        until(lambda: place.client().jobs())
        assert node.finish(0).lines == ()


def test_a_requested_stop_reaches_the_ranks_and_a_second_is_refused(place: Place) -> None:
    with place.daemon():
        place.node()
        rank = place.rank(0)
        until(lambda: place.num_ranks() == 1)
        assert place.client().request("job", "order.stop", by="ann", reason="maintenance").accepted
        assert isinstance(rank.order(), m.Prepare)
        second = place.client().request("job", "order.stop", by="bob")
        assert not second.accepted and "maintenance" in second.text


def test_the_contract_of_the_rank_lies_beside_its_incident(place: Place) -> None:
    write_json(RunDirectory(place.run_dir).contract_file(0), {"bounds": [1]})
    with place.daemon():
        node, rank = place.node(), place.rank(0)
        rank.say(m.Refused(rank=0, step=5, micro_step=0, violation=BAD_TOKEN))
        until(lambda: read_incidents(place.run_dir))
        assert place.client().contract("job") == {"bounds": [1]}
        node.finish(1)
    assert json.loads((RunDirectory(place.run_dir).incident("1") / "contract.json").read_text()) == {"bounds": [1]}


# The end


def test_a_daemon_that_ends_under_open_streams_prints_nothing(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    with place.daemon():
        place.node()
        until(lambda: place.num_ranks() == 0 and place.client().jobs())
    assert capfd.readouterr().err == ""


# Queries


def test_each_ranks_statistics_are_read_back_over_tcp(place: Place) -> None:
    with place.daemon("127.0.0.1:0", index_file=place.root / "index.sqlite", token="t") as daemon:
        (address,) = daemon.addresses
        place.node(daemon=address, token=lambda: "t")
        for rank in (0, 1):
            place.ring(rank).steps(*range(20), loss=float(rank))
        client = place.client(address, token="t")
        until(lambda: [rank.last_step for rank in client.job("job").ranks] == [19, 19] if client.jobs() else False)
        until(lambda: client.steps("job", 1, 19, 19) and client.steps("job", 0, 19, 19))  # judged first, then on disk
        (block,) = client.steps(
            "job", 1, 5, 5
        )  # the node may have read the ring while it was written: which step a block begins with is open
        (columns,) = block.tensors
        row = columns.rows.index(block.micro_of_step.index(5))
        assert columns.key == "input_ids" and columns.high[row] == 5.0 and columns.shapes[row] == (4, 8)
        assert {loss for block in client.steps("job", 1) for loss in block.loss} == {1.0}
        assert client.steps("job", 0, first_step=100) == ()
        assert client.steps("job") == tuple(read_blocks(place.run_dir))
        assert [(rank.rank, rank.loss) for rank in client.job("job").ranks] == [(0, 0.0), (1, 1.0)]
    assert (place.root / "index.sqlite").exists()


def test_a_question_about_an_unknown_job_names_it(place: Place) -> None:
    with place.daemon():
        for question in (place.client().job, place.client().incidents, place.client().contract, place.client().steps):
            with pytest.raises(UnknownJobError, match="nowhere"):
                question("nowhere")


def test_a_client_without_a_daemon_says_what_to_do(place: Place) -> None:
    with pytest.raises(DaemonUnreachableError, match="watchdog serve"):
        place.client().jobs()


def test_an_index_that_cannot_be_opened_costs_nothing_but_time(place: Place) -> None:
    (place.root / "file").write_text("no folder")
    with place.daemon(index_file=place.root / "file" / "index.sqlite"):
        talk(place.socket, HELLO, report(1, 0), m.NodeGoodbye(exit_code=0))
        assert [block.step for block in place.client().steps("job")] == [(0,)]
    assert len(place.said) == 1 and "index" in place.said[0]


def test_an_index_that_breaks_meanwhile_costs_nothing_but_time(place: Place) -> None:
    with place.daemon(index_file=place.root / "index.sqlite"):
        talk(place.socket, HELLO, report(1, 0), m.NodeGoodbye(exit_code=0))
        with contextlib.closing(sqlite3.connect(place.root / "index.sqlite")) as other:
            other.execute("DROP TABLE blocks")
        assert [block.step for block in place.client().steps("job")] == [(0,)]


def test_a_full_disk_is_said_once_and_the_node_is_still_answered(place: Place) -> None:
    place.run_dir.mkdir(parents=True)
    RunDirectory(place.run_dir).blocks.write_text("in the way, as a full disk would be")
    with place.daemon():
        answers = talk(place.socket, HELLO, report(1, 0), report(2, 1), m.NodeGoodbye(exit_code=0))
        assert [type(answer) for answer in answers] == [HelloAck, ReportAck, ReportAck, GoodbyeAck]
        assert place.client().job("job").ranks[0].last_step == 1
    assert len(place.said) == 1 and "training goes on" in place.said[0]
