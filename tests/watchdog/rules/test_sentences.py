"""What `watchdog rules show` says that a rule says is what it says: the same words, around other numbers."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from streams_made import Watch, block, everything
from torch import nn
from torch.nn import functional as F  # noqa: N812

sys.path.append(str(Path(__file__).parents[2] / "agent" / "contract"))

from guard_loop import Loop, abandon_all

from torch_watchdog.job.first_failure import FirstFailure, RankEnd
from torch_watchdog.job.hangs import ANSWER_S, HangWatch
from torch_watchdog.job.incident import Origin, Place, summary_of
from torch_watchdog.knowledge import known_assertions, xid_codes
from torch_watchdog.rules.always import ALWAYS
from torch_watchdog.rules.catalogue import rules_with
from torch_watchdog.rules.death import judge
from torch_watchdog_proto.rescue_words import Looked

RULES = rules_with({})
OF_REAL_RUNS = json.loads((Path(__file__).parents[2] / "faults" / "results.json").read_text())["runs"]
ASSERTION = (
    "/pytorch/aten/src/ATen/native/cuda/IndexKernelUtils.cu:16: vectorized_gather_kernel: block: [7,0,0], thread: [0,0,0] "
    'Assertion `ind >=0 && ind < ind_dim_size && "vectorized gather kernel index out of bounds"` failed.'
)


def form(sentence: str) -> str:
    """Numbers, and names that a training gives, do not count."""
    sentence = re.sub(r"\b(cpu|meta|cuda:\d+)", "DEVICE", sentence)
    plain = re.sub(r"\b(input_ids|labels|ids|values)\b", "NAME", re.sub(r"\(\w+, float32\)", "(MODULE)", sentence))
    plain = re.sub(r"the output of \S+", "the output of MODULE", re.sub(r" or -#|[-+]?\d+(\.\d+)?(e[-+]?\d+)?", "#", plain))
    return plain.replace(" or #", "").replace("[#, #]", "[#,#]")  # the recorded runs are older than this spelling of an element


@pytest.fixture(scope="module")
def told() -> dict[str, set[str]]:
    """By rule, what it has said of made streams."""
    watch = everything(Watch(codes=xid_codes(), ids_creep={"enabled": True}, straggler={"hold_s": 5.0}))
    slow = Watch(slow_loader={"hold_s": 2.0})
    slow.seconds(60, lambda step: (block(rank, step, own_ms=220, loader_ms=200 if step > 40 and rank else 1) for rank in range(3)))
    said: dict[str, set[str]] = {}
    for finding in (*watch.found, *slow.found):
        said.setdefault(finding.about.name, set()).add(form(finding.sign.said))
    return said


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.about.name)
def test_the_example_of_a_rule_is_a_sentence_of_it(rule: Any, told: dict[str, set[str]]) -> None:
    assert form(rule.about.says) in told[rule.about.name]


TOLD_BY_RUNS = {form(one["summary"]) for run in OF_REAL_RUNS.values() for one in run["found"] if one["summary"]}
OTHERS = {"memory.oom", "probability.out_of_range"}  # of which the suite has another sort
SEEN = {one["kind"] for run in OF_REAL_RUNS.values() for one in run["found"] if one["told"]} - OTHERS


@pytest.mark.parametrize("about", [one for one in ALWAYS if one.kind in SEEN], ids=lambda about: about.kind)
def test_the_example_of_what_is_always_watched_is_a_sentence_of_a_real_run(about: Any) -> None:
    assert any(one.startswith(form(about.says)) for one in TOLD_BY_RUNS)


def example_of(kind: str) -> str:
    (about,) = (one for one in ALWAYS if one.kind == kind)
    return form(about.says)


def test_the_example_of_where_in_a_model_a_loss_went_wrong_is_a_sentence_of_a_real_run() -> None:
    assert any(one.startswith(example_of("activation.not_finite")) for one in TOLD_BY_RUNS)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(64, 8), nn.Linear(8, 3)

    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.table(input_ids) * mask[..., None])
        chances = scores.mean((1, 2)).sigmoid() * rate
        return F.cross_entropy(scores.mT, labels) + F.binary_cross_entropy(chances, torch.ones(len(rate)))


def clean(length: int = 6) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.randint(0, 64, (4, length)), "mask": torch.ones(4, length), "labels": torch.randint(0, 3, (4, length)), "rate": torch.ones(4),
    }  # fmt: skip


BAD = {
    "batch.shape": {"mask": torch.ones(4, 5)},
    "batch.dtype": {"input_ids": torch.rand(4, 6)},
    "batch.device": {"labels": torch.zeros(4, 6, dtype=torch.int64, device="meta")},
    "probability.out_of_range": {"rate": torch.full((4,), -9.0)},
}


@pytest.mark.parametrize("kind", BAD)
def test_the_example_of_a_bad_batch_is_what_is_said_of_such_a_one(kind: str) -> None:
    """Of these the suite's real runs have none."""
    loop = Loop(Small(), lambda model, batch: model(**batch).backward())
    for length in (4, 5, 6, 7, 6, 5):
        assert loop.step(clean(length), go_on=False).violation is None
    found = loop.step(clean() | BAD[kind]).violation
    abandon_all()
    place = Place(incident_id="1", job="j", attempt=0, policy="stop", time_s=0.0, origin=Origin(rank=0), step=12)
    assert found is not None and found.kind == kind
    assert form(summary_of(found, place)) == example_of(kind)


def test_the_example_of_a_hang_is_what_is_said_of_such_a_rank() -> None:
    watch, now = HangWatch({}), 0.0
    for _ in range(10):
        watch.progressed(now := now + 0.4)
    now = watch.deadline or 0.0
    watch.asked(frozenset((0, 1)), 1, now)
    for rank, waits in enumerate((True, False)):
        watch.answered(
            Looked(
                rank=rank, generation=1, waits=waits, stack='  File "train.py", line 70, in forward\n    time.sleep(99)\n', timeout_s=600.0
            )
        )
    hung = watch.verdict(now + ANSWER_S)
    assert hung is not None
    verdict = judge(FirstFailure(culprits=(RankEnd(rank=1, node="a", pid=1, step=40, hung=hung.why),), victims=(0,)))
    assert (verdict.kind, form(verdict.summary)) == ("rank.hang", example_of("rank.hang"))


AT = {"exit_code": 1, "where": "train.py:7"}
FAILED = {
    "rank.assert": {"signal": 6, "log": ASSERTION},
    "memory.oom": {**AT, "text": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"},
    "config.ddp": {**AT, "text": "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one"},
    "loader.worker_died": {**AT, "text": "RuntimeError: DataLoader worker (pid 47) is killed by signal: Killed. "},
}


@pytest.mark.parametrize("kind", FAILED)
def test_the_example_of_a_failure_is_what_is_said_of_such_a_rank(kind: str) -> None:
    end: dict[str, Any] = FAILED[kind]
    verdict = judge(FirstFailure(culprits=(RankEnd(rank=1, node="a", pid=1, step=9, **end),), victims=(0,)), known_assertions())
    (about,) = (one for one in ALWAYS if one.kind == kind)
    assert (verdict.kind, form(verdict.summary)) == (kind, form(about.says))
