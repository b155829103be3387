"""Who failed first: transcripts of failures as their nodes saw them, and the rank that must be named.

A line of a transcript is one event, in the order in which the daemon heard of them; the last line is the verdict.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torch_watchdog.job.failures import FailureWatch
from torch_watchdog.job.first_failure import FirstFailure, RankEnd, blames_a_peer
from torch_watchdog.rules.assertions import Catalogue
from torch_watchdog.rules.death import judge
from torch_watchdog_proto.messages import RankEvent
from torch_watchdog_proto.rescue_words import Failed, GroupCalls, Looked

HERE = Path(__file__).parent
TRANSCRIPTS = sorted((HERE / "transcripts").glob("*.txt"))
KNOWLEDGE = HERE.parents[2] / "watchdog" / "torch_watchdog" / "rules" / "knowledge" / "kernel_asserts.tsv"
LINE = re.compile(
    r"node (?P<node>\w+) rank (?P<rank>\d+)(?P<between> between)?(?: step (?P<step>\d+))? "
    r"(?:raised at (?P<raised>[\d.]+): (?P<text>.*)|(?P<over>told its end)|(?P<told>was told)|(?P<gone>was gone)|"
    r"exited (?P<exit>-?\d+) at (?P<ended>[\d.]+)|printed: (?P<log>.*))"
)


def play(lines: list[str], *, by_itself: tuple[int, ...] = ()) -> FailureWatch:
    """All events, in order, of ranks whose pid is 100 + rank."""
    watch = FailureWatch()
    for order, line in enumerate(lines, 1):
        found = LINE.fullmatch(line)
        assert found, line
        rank, step = int(found["rank"]), int(found["step"] or 0)
        pid = 100 + rank
        if found["raised"]:
            time_ns = round(float(found["raised"]) * 1e9)
            word = Failed(
                rank=rank, step=step, between=bool(found["between"]), updates_applied=step, time_ns=time_ns, text=found["text"],
                by_itself=rank in by_itself,
            )  # fmt: skip
            watch.raised(word, node=found["node"], pid=pid, now=order)
        elif found["over"]:
            watch.said_end(pid, order)
        elif found["told"]:
            watch.told_of_another(pid)
        elif found["gone"]:
            watch.gone(pid)
        elif found["log"]:
            watch.hear(RankEvent(rank=rank, attempt=0, pid=pid, kind="log", time_ns=0, order=order, text=found["log"]), order)
        else:
            code = int(found["exit"])
            event = RankEvent(
                rank=rank, attempt=0, pid=pid, kind="exited", time_ns=round(float(found["ended"]) * 1e9), order=order,
                exit_code=code if code >= 0 else None, signal=-code if code < 0 else None,
            )  # fmt: skip
            watch.see(event, found["node"], step - 1 if found["step"] else None, now=order)
    return watch


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_the_transcripts_verdict(path: Path) -> None:
    *lines, verdict = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    first = play(lines).verdict(now=1000.0, all_ended=True)
    assert first is not None
    culprits = " ".join(str(end.rank) for end in first.culprits)
    victims = " ".join(map(str, first.victims)) or "none"
    kind = judge(first, Catalogue.from_text(KNOWLEDGE.read_text())).kind
    assert f"=> rank{'s' if len(first.culprits) > 1 else ''} {culprits}, victims {victims}, {kind}" == verdict


def both_raise(*, apart_ms: float, where: tuple[str, str] = ("train.py:60", "train.py:60")) -> FirstFailure:
    watch = FailureWatch()
    for rank in (0, 1):
        raised = 10_000_000_000 + round(rank * apart_ms * 1e6)
        word = Failed(
            rank=rank, step=5, updates_applied=5, time_ns=raised, text="ValueError: a fault of the script's own", where=where[rank]
        )
        watch.raised(word, node="a", pid=100 + rank, now=1.0)
    first = watch.verdict(now=1000.0, all_ended=True)
    assert first is not None
    return first


def test_one_failure_on_two_ranks_at_the_same_moment_is_told_as_both() -> None:
    """When each was noticed is no evidence: on a busy machine that is some 10 ms after it was raised."""
    assert [end.rank for end in both_raise(apart_ms=20).culprits] == [0, 1]
    assert [end.rank for end in both_raise(apart_ms=80).culprits] == [0]
    assert [end.rank for end in both_raise(apart_ms=20, where=("train.py:60", "train.py:61")).culprits] == [0]


def raise_one_by_one(*texts: str) -> FirstFailure:
    """Each 100 ms after the one before it."""
    watch = play([f"node a rank {rank} step 5 raised at {10 + rank / 10}: {text}" for rank, text in enumerate(texts)])
    first = watch.verdict(now=1000.0, all_ended=True)
    assert first is not None
    return first


def test_what_another_rank_raises_by_itself_is_told_beside_the_first() -> None:
    """It had been said to follow from the first, and was nowhere to be read."""
    first = raise_one_by_one("KeyError: 'x'", "IndexError: Target 7 is out of bounds.", "RuntimeError: Connection closed by peer")
    assert [end.rank for end in first.besides] == [1] and first.victims == (1, 2)
    told = judge(first)
    assert told.cause.endswith("; rank 1 raised an error of its own after it: IndexError: Target 7 is out of bounds.")
    assert "follows from this one" not in told.fix.replace("does not follow from this one", "")
    assert judge(raise_one_by_one("KeyError: 'x'", "RuntimeError: Connection closed by peer")).fix.endswith("raises follows from this one")


def test_of_many_that_raise_by_themselves_two_are_named() -> None:
    told = judge(raise_one_by_one("KeyError: 'x'", "KeyError: 'x'", *(f"ValueError: {rank}" + "." * 900 for rank in range(2, 64))))
    assert "; rank 1 raised the same by itself; rank 2 raised an error of its own after it: ValueError: 2.." in told.cause
    assert told.cause.endswith("; 60 more ranks raised errors of their own") and len(told.cause) < 800
    assert "other rank" not in judge(raise_one_by_one("KeyError: 'x'", "KeyError: 'x'")).fix


def test_that_ranks_are_in_different_collectives_is_said_once() -> None:
    why = "the ranks are in different collectives: collective 9 of process group 0 is not the same on all; rank 1: barrier at t.py:7; rank 0: all_gather"
    told = judge(FirstFailure(culprits=(RankEnd(rank=1, node="a", pid=1, step=5, hung=why, desync=True),), victims=(0,)))
    assert told.summary == f"rank 1, in step 5: {why.partition(';')[0]}"
    assert told.cause == "every rank waited, and not in the same collective: rank 1: barrier at t.py:7; rank 0: all_gather"


CPU = "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4503599627370496 bytes."
GPU = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


@pytest.mark.parametrize(("text", "of_host"), [("MemoryError", True), (CPU, True), (GPU, False)])
def test_whose_memory_ran_out_is_told_and_the_error_once(text: str, of_host: bool) -> None:
    told = judge(
        FirstFailure(culprits=(RankEnd(rank=1, node="a", pid=1, step=5, text=text, where="train.py:31", raised_ns=1),), victims=())
    )
    assert (told.kind, told.summary) == ("memory.oom", f"rank 1, in step 5: {text} at train.py:31")
    assert text not in told.cause
    assert ("host" in told.cause, "look at train.py:31" in told.fix, "smaller batches" in told.fix) == (of_host, of_host, not of_host)


SHORT = "WARNING: ran out of memory (CUDA out of memory), retrying the batch"
KILLED = "oom-kill: the kernel has killed a process of this container for want of memory"


@pytest.mark.parametrize(
    ("log", "text", "signal", "kind"),
    [
        (SHORT, "ValueError: no image", None, "rank.exception"),
        (SHORT, "", 9, "rank.died"),
        (SHORT, "", 11, "rank.died"),
        (f"{SHORT}\n{KILLED}", "", 9, "memory.oom"),
        (KILLED, "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.", None, "memory.oom"),
        ("what():  CUDA out of memory", "", 6, "memory.oom"),
        ("CUDA out of memory", "SystemExit: 1", None, "memory.oom"),
        (
            "Last error: Cuda failure 2 'out of memory'",
            "DistBackendError: NCCL error in: a.cpp:1, unhandled cuda error",
            None,
            "memory.oom",
        ),
    ],
)
def test_a_shortage_of_memory_that_the_script_got_over_is_not_what_it_ended_by(log: str, text: str, signal: int | None, kind: str) -> None:
    end = RankEnd(rank=1, node="a", pid=1, step=5, text=text, raised_ns=bool(text), log=log, signal=signal, exit_code=None if signal else 1)
    assert judge(FirstFailure(culprits=(end,), victims=(0,))).kind == kind


def test_what_every_rank_raises_is_no_ranks_own_and_an_error_of_ours_says_what_to_do() -> None:
    both = both_raise(apart_ms=20)
    assert "each raised this by itself" in judge(both).cause and "no other rank" not in judge(both).cause
    refused = replace(both.culprits[0], text="RestoreError: cannot resume from runs/x: it was never finished. Take an older one")
    assert judge(replace(both, culprits=(refused,))).fix.startswith("do what the error says")


@pytest.mark.parametrize(
    ("text", "raised_ns", "kind"),
    [
        ("ValueError: no image", 5, "rank.exception"),
        ("", 0, "rank.died"),
        ("KeyboardInterrupt", 5, "rank.died"),
        ("step 39: held: batch[0, 0] = 777", 0, "rank.died"),  # a note, and no failure
    ],
)
@pytest.mark.parametrize(("number", "name"), [(15, "SIGTERM"), (9, "SIGKILL"), (6, "SIGABRT")])
def test_a_rank_that_had_raised_before_a_signal_ended_it_has_failed_by_what_it_raised(
    text: str, raised_ns: int, kind: str, number: int, name: str
) -> None:
    """While others saved: it was asked to end, its keeper was killed, or native code gave up on its way out."""
    end = replace(both_raise(apart_ms=20).culprits[0], text=text, raised_ns=raised_ns, exit_code=None, signal=number)
    told = judge(FirstFailure(culprits=(end,), victims=()))
    assert told.kind == kind
    assert kind == "rank.died" or (text in told.summary and f"ended after that, by {name}; it raised this itself" in told.cause)


def test_of_ranks_that_were_in_the_same_step_none_is_said_to_be_in_an_earlier_one() -> None:
    left = RankEnd(rank=1, node="a", pid=1, step=12, exit_code=0, finished=True)
    told = judge(FirstFailure(culprits=(left,), victims=(0,), desync=True))
    assert told.cause == "rank 1 came to its end, with exit code 0, while rank 0 went on, whose next collective then had no partner"


@pytest.mark.parametrize("last_known", [8, 7])  # its own end may be known by a step of before
def test_a_rank_that_ends_with_0_in_the_middle_of_a_step_has_skipped_no_batch(last_known: int) -> None:
    """os._exit(0), say: it ran no backward of that step, for it was gone."""
    watch = play(
        [
            "node a rank 0 step 8 raised at 10.0: RuntimeError: Connection closed by peer",
            f"node a rank 1 step {last_known} exited 0 at 9.9",
            "node a rank 0 exited 1 at 11.0",
        ]
    )
    first = watch.verdict(now=1000.0, all_ended=True, skipped={1: 8})
    assert first is not None
    assert (first.desync, first.skipped, [end.rank for end in first.culprits]) == (True, False, [1])
    assert "sys.exit()" in judge(first, Catalogue()).fix


@pytest.mark.parametrize(
    ("printed", "kind"),
    [
        (None, "rank.desync"),
        ("terminate called without an active exception", "rank.desync"),
        (
            "Indexing.cu:1369: indexSelectSmallIndex: block: [0,0,0], thread: [0,0,0] Assertion `srcIndex < srcSelectDimSize` failed.",
            "rank.assert",
        ),
    ],
)
def test_a_rank_whose_script_is_over_and_that_native_code_then_aborts_has_ended_early(printed: str | None, kind: str) -> None:
    """gloo's threads do that now and then to a process that did not destroy its groups. A failure on the device that a script hides is not that."""
    lines = [
        "node a rank 0 step 8 raised at 10.0: RuntimeError: Connection closed by peer",
        "node a rank 1 told its end",
        f"node a rank 1 printed: {printed}",
        "node a rank 1 step 8 exited -6 at 9.9",
        "node a rank 0 exited 1 at 11.0",
    ]
    first = play([line for line in lines if not line.endswith("None")]).verdict(now=1000.0, all_ended=True, skipped={1: 8})
    assert first is not None and [end.rank for end in first.culprits] == [1]
    assert (judge(first, Catalogue.from_text(KNOWLEDGE.read_text())).kind, first.skipped) == (kind, False)


def test_an_abort_after_all_scripts_are_over_is_told_as_one_on_the_way_out() -> None:
    lines = ["node a rank 1 step 8 exited -6 at 9.9", "node a rank 1 told its end", "node a rank 0 step 8 exited 0 at 9.9"]
    first = play(lines).verdict(now=1000.0, all_ended=True)
    assert first is not None
    verdict = judge(first)
    assert verdict.kind == "rank.died" and verdict.summary.endswith("on its way out, after its training was over")
    assert "time.sleep(0.5)" in verdict.fix and "no need to launch it again" in verdict.fix


def test_an_abort_on_the_way_out_while_another_rank_still_trained_is_not_behind_the_training() -> None:
    lines = ["node a rank 1 step 8 exited -6 at 9.9", "node a rank 1 told its end", "node a rank 0 step 8 exited -15 at 11.0"]
    first = play(lines).verdict(now=1000.0, all_ended=True)
    assert first is not None and [end.rank for end in first.culprits] == [1]
    verdict = judge(first)
    assert verdict.summary.endswith("on its way out, after its script was over")
    assert "time.sleep(0.5)" in verdict.fix and "no need to launch it again" not in verdict.fix


def test_a_connection_to_ones_own_loaders_worker_is_none_to_a_peer() -> None:
    lost = "RuntimeError: Connection reset by peer"
    assert blames_a_peer(lost)
    assert not blames_a_peer(f"{lost}; DataLoader worker (pid 7) exited unexpectedly with exit code 0")


def test_a_slow_culprit_is_waited_for_while_every_word_only_blames_a_peer() -> None:
    watch = play(["node a rank 0 step 7 raised at 10.0: RuntimeError: Connection closed by peer"])
    assert watch.verdict(now=5.0, all_ended=False) is None
    assert watch.verdict(now=12.0, all_ended=False) is not None


SERVER_IS_GONE = [
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "OSError: ('Connection aborted.', RemoteDisconnected('Remote end closed connection without response'))",
    "ConnectionRefusedError: [Errno 111] Connection refused (in DataLoader worker process 0)",
    "RuntimeError: Read error in shard-7.tar (in DataLoader worker process 1)",
]


@pytest.mark.parametrize("text", SERVER_IS_GONE)
@pytest.mark.parametrize(
    "other", ["b rank 0 step 7 raised at 10.0: RuntimeError: Connection closed by peer", "a rank 0 step 7 exited 1 at 12.0"]
)
def test_a_rank_whose_server_of_data_is_gone_is_no_victim(text: str, other: str) -> None:
    """Another host's clock tells nothing, and a rank whose script catches what it met ends without a word."""
    first = play([f"node a rank 1 step 7 raised at 11.0: {text}", f"node {other}"]).verdict(now=1000.0, all_ended=True)
    assert first is not None
    assert [end.rank for end in first.culprits] == [1]


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4242",
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 3.",
        "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms",
        "RuntimeError: Timed out waiting 1800000ms for recv operation to complete",
        "torch.distributed.DistNetworkError: Broken pipe",
        "torch.distributed.DistStoreError: wait timeout after 300000ms",
    ],
)
def test_words_of_a_victim(text: str) -> None:
    assert blames_a_peer(text)


@pytest.mark.parametrize(
    "text",
    [
        "ValueError: no image",
        "CUDA error: device-side assert triggered",
        "KeyError: 'peer'",
        *SERVER_IS_GONE,
    ],
)
def test_words_of_a_culprit(text: str) -> None:
    assert not blames_a_peer(text)


OF_ITS_OWN = [
    "ClientOSError: [Errno 104] Connection reset by peer",
    "ProtocolError: ('Connection aborted.', RemoteDisconnected('Remote end closed connection without response'))",
    "RuntimeError: Socket Timeout",
    "ReadTimeout: HTTPSConnectionPool(host='data', port=443): Read timed out.",
]


@pytest.mark.parametrize("text", OF_ITS_OWN)
@pytest.mark.parametrize("node", ["a", "b"])
def test_a_network_error_that_was_raised_outside_of_torch_is_the_ranks_own(text: str, node: str) -> None:
    lines = [f"node a rank 1 step 5 raised at 11.0: {text}", f"node {node} rank 0 step 5 raised at 10.9: {CLOSED}"]
    watch = play(lines, by_itself=(1,))
    assert watch.culprit_is_known and not watch.is_victim(101) and not watch.has_waited(101)
    first = watch.verdict(now=1000.0, all_ended=True, skipped={1: 5})
    assert first is not None
    assert ([end.rank for end in first.culprits], first.victims, first.skipped) == ([1], (0,), False)
    verdict = judge(first)
    assert verdict.kind == "rank.exception" and "it raised this itself" in verdict.cause


def test_words_of_ranks_that_a_script_hands_on_are_told_where_nobody_failed_by_himself() -> None:
    """`raise RuntimeError(str(error))`, long after the error was handled."""
    lines = [f"node a rank 1 step 5 raised at 11.0: {CLOSED}", f"node a rank 0 step 5 raised at 10.9: {CLOSED}"]
    first = play(lines, by_itself=(1,)).verdict(now=1000.0, all_ended=True)
    assert first is not None
    assert ([end.rank for end in first.culprits], first.victims) == ([1], (0,))
    first = play([*lines, "node a rank 2 step 5 exited -9 at 12.0"], by_itself=(1,)).verdict(now=1000.0, all_ended=True)
    assert first is not None
    assert ([end.rank for end in first.culprits], first.victims) == ([2], (0, 1))


def test_an_error_on_another_host_is_told_beside_a_crash_for_their_clocks_are_not_compared() -> None:
    lines = ["node a rank 0 step 4 exited -11 at 10.0", "node b rank 1 step 5 raised at 500.0: ValueError: no image"]
    first = play(lines).verdict(now=1000.0, all_ended=True)
    assert first is not None
    assert ([end.rank for end in first.culprits], [end.rank for end in first.besides]) == ([0], [1])


NO_SERVER = "DistNetworkError: The client socket has timed out after 1000ms while trying to connect to (10.0.0.7, 1)."
OF_A_STORE = [NO_SERVER, "DistStoreError: wait timeout after 1000ms, keys: /x", "DistNetworkError: Broken pipe"]


@pytest.mark.parametrize("text", OF_A_STORE)
@pytest.mark.parametrize("node", ["a", "b"])
def test_an_error_of_a_store_that_is_not_the_jobs_is_the_ranks_own(text: str, node: str) -> None:
    watch = play([f"node a rank 1 step 5 raised at 11.0: {text}", f"node {node} rank 0 step 5 raised at 10.9: {CLOSED}"], by_itself=(1,))
    assert watch.culprit_is_known and not watch.is_victim(101) and not watch.has_waited(101)
    first = watch.verdict(now=1000.0, all_ended=True)
    assert first is not None
    assert ([end.rank for end in first.culprits], first.victims) == ([1], (0,))
    verdict = judge(first)
    assert verdict.kind == "rank.exception" and "it raised this itself" in verdict.cause


@pytest.mark.parametrize(
    ("other", "culprit"),
    [
        ("a rank 0 step 5 exited -9 at 11.4", 0),
        ("b rank 0 step 5 exited -9 at 500.0", 0),
        ("a rank 0 step 5 exited 0 at 10.9", 0),
        ("b rank 0 step 5 raised at 500.0: ValueError: no image", 0),
        ("a rank 0 step 5 raised at 10.0: ValueError: no image", 0),
        ("a rank 0 step 5 raised at 11.5: ValueError: the training failed", 1),
        ("a rank 0 step 5 raised at 11.5: SystemExit: 1", 1),
        ("a rank 0 step 9 exited 0 at 11.9", 1),
    ],
)
def test_a_rank_whose_own_store_was_another_ranks_has_lost_that_one(other: str, culprit: int) -> None:
    first = play([f"node a rank 1 step 5 raised at 11.0: {NO_SERVER}", f"node {other}"], by_itself=(1,)).verdict(now=1000.0, all_ended=True)
    assert first is not None and [end.rank for end in first.culprits] == [culprit]


@pytest.mark.parametrize(
    ("text", "is_own"),
    [
        ("ValueError: rank 3 of the matrix: timed out waiting for its factors", True),
        ("LinAlgError: a tensor of rank 2 is no matrix: the solver timed out", True),
        ("ClientOSError: the low-rank update: Connection reset by peer", True),
        ("RuntimeError: rank 1: cannot read s3://b/7: Read timed out, connection reset", True),
        ("RuntimeError: rank 1 failed to read shard 7: connection reset by peer", True),
        ("RuntimeError: timed out waiting for rank 0", False),
        ("RuntimeError: timed out waiting for all other ranks", False),
        ("RuntimeError: rank 0 is gone: connection reset by peer", False),
        ("RuntimeError: lost rank 0: connection closed by peer", False),
    ],
)
def test_the_word_rank_makes_a_victim_only_where_another_is_meant(text: str, is_own: bool) -> None:
    lines = [f"node a rank 1 step 5 raised at 10.9: {text}", f"node a rank 0 step 5 raised at 11.0: {CLOSED}"]
    watch = play(lines, by_itself=(1,))
    assert (watch.is_victim(101), watch.has_waited(101)) == (not is_own, not is_own)
    first = watch.verdict(now=1000.0, all_ended=True)
    assert first is not None and [end.rank for end in first.culprits] == [1]
    assert ("it raised this itself" in judge(first).cause, "words of a rank that waited" in judge(first).cause) == (is_own, not is_own)


def test_a_rank_that_failed_in_the_middle_of_a_step_has_skipped_none_of_its_batches() -> None:
    lines = [f"node a rank 1 step 5 raised at 11.0: {CLOSED}", f"node a rank 0 step 5 raised at 10.9: {CLOSED}"]
    first = play(lines).verdict(now=1000.0, all_ended=True, skipped={1: 5})
    assert first is not None
    assert not first.skipped
    first = play(lines).verdict(now=1000.0, all_ended=True, skipped={1: 4})
    assert first is not None
    assert first.skipped


WAITED = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation to complete"
CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:53440."


def test_a_rank_that_skipped_a_batch_is_the_culprit_of_those_that_waited_for_it_though_it_still_lives() -> None:
    watch = play([f"node a rank 0 step 9 raised at 10.0: {WAITED}"])
    first = watch.verdict(now=1000.0, all_ended=True, skipped={1: 5})
    assert first is not None
    assert ([(end.rank, end.step) for end in first.culprits], first.victims) == ([(1, 5)], (0,))
    verdict = judge(first)
    assert verdict.kind == "rank.desync"
    assert "rank 1, in step 5: it skipped a batch" in verdict.summary
    assert "A checkpoint from after that step, whole as it may be, holds updates that were made out of step" in verdict.cause
    assert "go on from a checkpoint from before step 5" in verdict.fix
    assert "all_reduce" in verdict.fix


def test_the_first_of_several_that_skipped_is_named() -> None:
    watch = play([f"node a rank 0 step 9 raised at 10.0: {WAITED}", "node a rank 2 step 9 exited -15 at 11.0"])
    first = watch.verdict(now=1000.0, all_ended=True, skipped={1: 7, 2: 5})
    assert first is not None
    assert [(end.rank, end.step) for end in first.culprits] == [(2, 5)]


@pytest.mark.parametrize("skipped", [{1: 5}, {0: 5}])
def test_a_failure_of_a_ranks_own_is_not_explained_by_a_skipped_batch(skipped: dict[int, int]) -> None:
    watch = play(["node a rank 0 step 9 raised at 10.0: ValueError: no image"])
    first = watch.verdict(now=1000.0, all_ended=True, skipped=skipped)
    assert first is not None
    assert (first.skipped, [end.rank for end in first.culprits]) == (False, [0])


def test_a_rank_that_skipped_and_is_the_only_one_to_wait_explains_nothing() -> None:
    watch = play([f"node a rank 0 step 9 raised at 10.0: {WAITED}"])
    first = watch.verdict(now=1000.0, all_ended=True, skipped={0: 5})
    assert first is not None
    assert not first.skipped


# One has waited for as long as it may, and says for nobody whom


def gave_up(*, made: int = 9, skipped: dict[int, int] | None = None, looked: Looked | None = None, state: str = "S") -> FirstFailure:
    """Rank 0 timed out; rank 1, which it waited for, was asked where it was."""
    watch = FailureWatch()
    calls = (GroupCalls(group="0", made=made),)
    word = Failed(rank=0, step=9, updates_applied=9, time_ns=1, text=WAITED, where="train.py:7", calls=calls)
    watch.raised(word, node="a", pid=100, now=1.0)
    watch.asked(frozenset({1}))
    watch.state(1, state)
    if looked is not None:
        watch.looked(looked)
    assert watch.verdict(now=1.5, all_ended=False) is None
    first = watch.verdict(now=4.5, all_ended=False, skipped=skipped or {})
    assert first is not None
    return first


def looks(*, waits: bool, made: int = 9) -> Looked:
    stack = '  File "/x/train.py", line 70, in main\n    time.sleep(12)\n'
    return Looked(
        rank=1,
        generation=4,
        waits=waits,
        stack=stack,
        timeout_s=8.0,
        calls=(GroupCalls(group="0", made=made),),
        step=9,
        where="train.py:70",
    )


@pytest.mark.parametrize(
    ("more", "kind", "words"),
    [
        ({"looked": looks(waits=True, made=8)}, "rank.desync", "rank 1 has called 8 collectives, rank 0 9"),
        ({"looked": looks(waits=False)}, "rank.hang", 'it is not in a collective, but in File "/x/train.py", line 70'),
        ({"state": "T"}, "rank.hang", "SIGSTOP"),
        ({}, "rank.hang", "it does not answer"),
        ({"looked": looks(waits=False), "skipped": {1: 5}}, "rank.desync", "it skipped a batch"),
    ],
)
def test_whom_the_others_waited_for_is_the_culprit_not_who_gave_up_first(more: dict[str, Any], kind: str, words: str) -> None:
    first = gave_up(**more)
    assert ([end.rank for end in first.culprits], first.victims) == ([1], (0,))
    verdict = judge(first)
    assert verdict.kind == kind
    assert words in verdict.summary


@pytest.mark.parametrize("note", ["", "DistBackendError: NCCL communicator was aborted on rank 0. "])
def test_a_stopped_rank_is_the_culprit_where_nccl_ends_the_one_that_gave_up_without_a_word_of_pythons(note: str) -> None:
    """As recorded on an H200: its watchdog thread ends the process."""
    watch = FailureWatch()
    watch.state(1, "T")
    printed = "what():  [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception: [Rank 0] Watchdog caught collective "
    known = {"rank": 0, "attempt": 0, "pid": 100, "time_ns": 1}
    watch.hear(RankEvent(kind="log", order=1, text=f"{printed}operation timeout", level="warning", **known), 0.0)
    if note:
        watch.hear(RankEvent(kind="note", order=2, text=note, level="error", **known), 0.0)
    watch.see(RankEvent(kind="exited", order=3, signal=6, **known), "a", 29, 1.0)
    first = watch.verdict(now=1000.0, all_ended=False)
    assert first is not None
    assert ([end.rank for end in first.culprits], first.victims) == ([1], (0,))
    verdict = judge(first)
    assert verdict.kind == "rank.hang" and "SIGSTOP" in verdict.summary


def test_of_two_in_different_collectives_the_stranger_to_the_loop_is_the_culprit_not_who_gave_up() -> None:
    """FSDP: a rank that left its loop waits in a barrier, in the place of the next all_gather of the other."""
    watch = FailureWatch()
    gathers = GroupCalls(group="0", made=10, newest="all_gather_into_tensor of (186,) float32", alike=8, times=9)
    word = Failed(rank=0, step=5, updates_applied=5, time_ns=1, text=WAITED, where="train.py:7", calls=(gathers,))
    watch.raised(word, node="a", pid=100, now=1.0)
    watch.asked(frozenset({1}))
    calls = (GroupCalls(group="0", made=10, newest="barrier", alike=7),)
    watch.looked(Looked(rank=1, generation=4, waits=True, stack="", timeout_s=8.0, calls=calls, step=5, where="train.py:70"))
    first = watch.verdict(now=20.0, all_ended=False)
    assert first is not None
    assert ([end.rank for end in first.culprits], first.victims) == ([1], (0,))
    assert "rank 1: barrier at train.py:70" in judge(first).cause


def test_where_all_were_in_the_same_collective_the_one_that_gave_up_is_all_there_is() -> None:
    watch = FailureWatch()
    word = Failed(rank=0, step=9, updates_applied=9, time_ns=1, text=WAITED, calls=(GroupCalls(group="0", made=9),))
    watch.raised(word, node="a", pid=100, now=1.0)
    watch.asked(frozenset({1}))
    watch.looked(looks(waits=True))
    first = watch.verdict(now=20.0, all_ended=False)
    assert first is not None
    assert [end.rank for end in first.culprits] == [0]
    told = judge(first)
    assert "waited for another or lost it, and no other is known to have failed" in told.cause and "by itself" not in told.cause
    assert "look at the other ranks" in told.fix and "follows from this one" not in told.fix


def test_one_that_has_raised_before_it_could_be_asked_is_not_called_silent() -> None:
    watch = FailureWatch()
    word = Failed(rank=0, step=9, updates_applied=9, time_ns=1_000_000, text=WAITED, calls=(GroupCalls(group="0", made=9),))
    watch.raised(word, node="a", pid=100, now=1.0)
    watch.asked(frozenset({1}))
    closed = Failed(rank=1, step=9, updates_applied=9, time_ns=9_000_000, text=CLOSED)
    watch.raised(closed, node="a", pid=101, now=1.1)
    first = watch.verdict(now=20.0, all_ended=False)
    assert first is not None
    assert ([end.rank for end in first.culprits], first.culprits[0].hung) == ([0], "")


@pytest.mark.parametrize("late_word", [0, 1])
def test_two_that_waited_in_different_collectives_are_told_apart_whoever_is_heard_first(late_word: int) -> None:
    """The one that gave up may be slower to say so than the other, which sees its connection break of that."""
    watch = FailureWatch()
    reduces = GroupCalls(group="0", made=10, newest="broadcast of (1,) int64", alike=8, times=9)
    barrier = GroupCalls(group="0", made=10, newest="barrier", alike=7)
    words = [
        Failed(rank=0, step=5, updates_applied=5, time_ns=1_000, text=WAITED, where="train.py:7", calls=(reduces,)),
        Failed(rank=1, step=5, updates_applied=5, time_ns=9_000, text=CLOSED, where="train.py:70", calls=(barrier,)),
    ]
    watch.raised(words[1 - late_word], node="a", pid=101 - late_word, now=1.0)
    watch.asked(frozenset({late_word}))  # it has raised before it could answer
    watch.raised(words[late_word], node="a", pid=100 + late_word, now=1.1)
    first = watch.verdict(now=20.0, all_ended=False)
    assert first is not None
    assert ([end.rank for end in first.culprits], first.victims, judge(first).kind) == ([1], (0,), "rank.desync")


def test_a_rank_that_holds_the_others_up_is_the_culprit_though_one_that_saw_a_connection_break_spoke_first() -> None:
    watch = FailureWatch()
    calls = (GroupCalls(group="0", made=9),)
    watch.raised(Failed(rank=2, step=9, updates_applied=9, time_ns=9_000, text=CLOSED, calls=calls), node="a", pid=102, now=1.0)
    watch.asked(frozenset({0, 1}))
    watch.looked(looks(waits=False))
    watch.raised(Failed(rank=0, step=9, updates_applied=9, time_ns=1_000, text=WAITED, calls=calls), node="a", pid=100, now=1.1)
    first = watch.verdict(now=20.0, all_ended=False)
    assert first is not None
    assert ([end.rank for end in first.culprits], first.victims, judge(first).kind) == ([1], (0, 2), "rank.hang")


SIZES = "what():  [enforce fail at gloo/pair.cc:456] op.preamble.length <= op.nbytes. 400000 vs 4560. Received data size doesn't match expected size"
STRAY, USUAL = ("all_reduce of (100000,) float32", 0), ("all_reduce of (1140,) float32 (called by C++, as a backward's are)", 14)


@pytest.mark.parametrize(
    ("newest", "node", "culprit", "words"),
    [
        (STRAY, "a", 1, "rank 1, in step 9: it is in a collective that it had never called before"),
        (USUAL, "a", 0, "rank 0, in step 9: gloo met data of another size"),
        (STRAY, "b", 0, "rank 0, in step 9: gloo met data of another size"),  # two calls of Python's on two nodes nobody compares
    ],
)
def test_a_process_that_gloo_ends_over_a_size_need_not_be_the_one_in_the_wrong_call(
    newest: tuple[str, int], node: str, culprit: int, words: str
) -> None:
    watch = play(["node a rank 0 step 9 exited -6 at 9.9", f"node a rank 0 printed: {SIZES}"])
    calls = (GroupCalls(group="0", made=15, newest=newest[0], alike=7, times=newest[1]), GroupCalls(group="1", made=1, newest="barrier"))
    word = Failed(rank=1, step=9, updates_applied=9, time_ns=10_000_000_000, text=CLOSED, where="train.py:7", calls=calls)
    watch.raised(word, node=node, pid=101, now=5.0)
    first = watch.verdict(now=1000.0, all_ended=True)
    assert first is not None
    assert ([end.rank for end in first.culprits], first.victims) == ([culprit], (1 - culprit,))
    verdict = judge(first)
    assert (verdict.kind, verdict.summary[: len(words)]) == ("rank.desync", words)
    assert f"rank 1: {newest[0]} at train.py:7, in step 9" in verdict.cause


def test_ranks_that_were_found_waiting_for_each_other_are_told_together_whoever_is_freed_first() -> None:
    watch = FailureWatch()
    why = "the ranks wait for each other: they use two process groups in different order; rank 0: all_reduce"
    for rank, raised_ns in ((0, 2_000_000_000), (1, 1_000_000_000)):
        watch.hung(rank, node="a", pid=100 + rank, step=9, why=why, now=1.0, desync=True)
        watch.raised(Failed(rank=rank, step=9, updates_applied=9, time_ns=raised_ns, text=CLOSED), node="a", pid=100 + rank, now=2.0)
    first = watch.verdict(now=1000.0, all_ended=True)
    assert first is not None
    assert ([end.rank for end in first.culprits], first.victims) == ([0, 1], ())
    assert judge(first).summary.startswith("ranks 0 and 1 (nothing tells which was first), in step 9: the ranks wait for each other")


def test_what_native_code_threw_as_it_ended_the_process_is_told() -> None:
    lines = ["node a rank 0 step 9 exited -6 at 9.9", "node a rank 0 printed:   what():  epoll_ctl: Bad file descriptor"]
    first = play(lines).verdict(now=1000.0, all_ended=True)
    assert first is not None
    assert judge(first).cause == "the process was ended by SIGABRT: native code gave up: epoll_ctl: Bad file descriptor"
