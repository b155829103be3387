"""Who failed first: transcripts of failures as their nodes saw them, and the rank that must be named.

A line of a transcript is one event, in the order in which the daemon heard of them; the last line is the verdict.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torch_watchdog.job.failures import FailureWatch
from torch_watchdog.job.first_failure import blames_a_peer
from torch_watchdog.rules.assertions import Catalogue
from torch_watchdog.rules.death import judge
from torch_watchdog_proto.messages import RankEvent
from torch_watchdog_proto.rescue_words import Failed

HERE = Path(__file__).parent
TRANSCRIPTS = sorted((HERE / "transcripts").glob("*.txt"))
KNOWLEDGE = HERE.parents[2] / "watchdog" / "torch_watchdog" / "rules" / "knowledge" / "kernel_asserts.tsv"
LINE = re.compile(
    r"node (?P<node>\w+) rank (?P<rank>\d+)(?P<between> between)?(?: step (?P<step>\d+))? "
    r"(?:raised at (?P<raised>[\d.]+): (?P<text>.*)|exited (?P<exit>-?\d+) at (?P<ended>[\d.]+)|printed: (?P<log>.*))"
)


def play(lines: list[str]) -> FailureWatch:
    """All events, in order, of ranks whose pid is 100 + rank."""
    watch = FailureWatch()
    for order, line in enumerate(lines, 1):
        found = LINE.fullmatch(line)
        assert found, line
        rank, step = int(found["rank"]), int(found["step"] or 0)
        pid = 100 + rank
        if found["raised"]:
            time_ns = round(float(found["raised"]) * 1e9)
            word = Failed(rank=rank, step=step, between=bool(found["between"]), updates_applied=step, time_ns=time_ns, text=found["text"])
            watch.raised(word, node=found["node"], pid=pid, now=order)
        elif found["log"]:
            watch.log(pid, found["log"])
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


def test_a_slow_culprit_is_waited_for_while_every_word_only_blames_a_peer() -> None:
    watch = play(["node a rank 0 step 7 raised at 10.0: RuntimeError: Connection closed by peer"])
    assert watch.verdict(now=5.0, all_ended=False) is None
    assert watch.verdict(now=12.0, all_ended=False) is not None


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4242",
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 3.",
        "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms",
        "RuntimeError: Timed out waiting 1800000ms for recv operation to complete",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "torch.distributed.DistStoreError: wait timeout after 300000ms",
    ],
)
def test_words_of_a_victim(text: str) -> None:
    assert blames_a_peer(text)


@pytest.mark.parametrize("text", ["ValueError: no image", "CUDA error: device-side assert triggered", "KeyError: 'peer'"])
def test_words_of_a_culprit(text: str) -> None:
    assert not blames_a_peer(text)
