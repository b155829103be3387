"""The faults of the suite, each with what must be said of it, and the clean runs, of which nothing may be said."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

ANY = "any"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`kinds`: what it may be called, and `says` a word of it, where a kind has several. `rank`: who must be named (None: nobody alone, ANY: whoever).
    `lasts`: steps; 0: it ends the training. `needs`: what the training must be like for it. `watch`: a rule that is off by default.
    """

    name: str
    does: str
    kinds: tuple[str, ...]
    rank: int | str | None
    lasts: int = 0
    needs: tuple[tuple[str, Any], ...] = ()
    says: str = ""
    watch: str = ""


LASTING = (
    Fault(name="spike", does="the loss of one rank is higher by 20", kinds=("loss.spike",), rank=1, lasts=40),
    Fault(name="spike", does="the loss of all ranks is higher by 20", kinds=("loss.spike",), rank=None, lasts=40),
    Fault(name="wrong_labels", does="one rank's labels are shifted by one class", kinds=("loss.spike",), rank=0, lasts=60,
          needs=(("lr", 0.01), ("decay", True))),
    Fault(name="straggler_sleep", does="one rank sleeps in each forward", kinds=("rank.straggler",), rank=1, lasts=110),
    Fault(name="straggler_sleep", does="one rank sleeps in each forward", kinds=("rank.straggler",), rank=0, lasts=110),
    Fault(name="straggler_compute", does="one rank computes more", kinds=("rank.straggler",), rank=1, lasts=110),
    Fault(name="slow_loader", does="one rank's data take 250 ms a batch", kinds=("loader.stalled",), rank=1, lasts=36),
    Fault(name="slow_loader", does="all ranks' data take 250 ms a batch", kinds=("loader.stalled",), rank=ANY, lasts=36),
    Fault(name="supervision", does="one rank's labels are all ignored but one", kinds=("batch.empty",), rank=0, lasts=40,
          needs=(("ignored", 0.2), ("batch", 64))),
    Fault(name="supervision", does="all labels are ignored but one a batch", kinds=("batch.empty",), rank=ANY, lasts=40,
          needs=(("ignored", 0.2), ("batch", 64))),
    Fault(name="overflow", does="every gradient overflows half precision", kinds=("scaler.collapse",), rank=None, lasts=30, needs=(("scaler", True),)),
    Fault(name="long_batch", does="one batch is 40 times as long", kinds=("batch.size_outlier",), rank=1, lasts=1, needs=(("batch", 32),)),
)  # fmt: skip
ENDING = (
    Fault(name="nan_loss", does="the loss of one rank is NaN", kinds=("loss.not_finite",), rank=1),
    Fault(name="nan_loss", does="the loss of all ranks is NaN", kinds=("loss.not_finite",), rank=None),
    Fault(name="inf_loss", does="the loss of one rank is infinite", kinds=("loss.not_finite",), rank=0),
    Fault(name="nan_gradient", does="a square root at 0 in backward", kinds=("grad.not_finite",), rank=None, needs=(("clip", True),)),
    Fault(name="nan_parameter", does="a parameter of one rank turns NaN", kinds=("loss.not_finite",), rank=1),
    Fault(name="explode", does="the learning rate is 1e30", kinds=("loss.not_finite", "grad.not_finite"), rank=ANY),
    Fault(name="id_high", does="a token past the table", kinds=("batch.index_out_of_range",), rank=1),
    Fault(name="id_negative", does="a token of -1", kinds=("batch.index_out_of_range",), rank=0),
    Fault(name="label_high", does="a label past the classes", kinds=("batch.index_out_of_range",), rank=1),
    Fault(name="label_negative", does="a label of -1", kinds=("batch.index_out_of_range",), rank=0),
    Fault(name="nan_input", does="NaN among the inputs", kinds=("batch.not_finite",), rank=1),
    Fault(name="all_ignored", does="no label of a batch is supervised", kinds=("batch.empty",), rank=0),
    Fault(name="exception", does="the script raises", kinds=("rank.exception",), rank=1),
    Fault(name="memory_error", does="the script runs out of memory", kinds=("memory.oom", "rank.exception"), rank=0),
    Fault(name="exit", does="sys.exit(3)", kinds=("rank.exception", "rank.died"), rank=1),
    Fault(name="kill", does="kill -9", kinds=("rank.died",), rank=0),
    Fault(name="segfault", does="a segmentation fault", kinds=("rank.died",), rank=1),
    Fault(name="other_collective", does="ranks all-reduce different shapes", kinds=("rank.desync",), rank=ANY),
)  # fmt: skip
PRECURSORS = (
    Fault(name="probability_creep", does="probabilities of no sigmoid come 0.002 nearer to 1 each step", kinds=("probability.out_of_range",), rank=1, lasts=140,
          needs=(("bce", True),)),
    Fault(name="padded_id", does="a token past the tokenizer, in a padded table", kinds=("batch.index_out_of_range",), rank=0, lasts=1,
          needs=(("padded", True),), says="tokenizer"),
    Fault(name="ids_creep", does="the highest id rises by 2 a step towards the end of its table", kinds=("batch.index_out_of_range",), rank=1, lasts=150,
          needs=(("vocabulary", 512), ("highest_id", 100)), says="rises by", watch="ids_creep"),
)  # fmt: skip
FAULTS = (*LASTING, *ENDING, *PRECURSORS)
PAIRS = (("model", "pairs"), ("length", 1000), ("batch", 32))
ROOM = (("room_gib", 62),)
ON_GPU = (  # tests/gpu/faults.py
    Fault(name="leak", does="a rank keeps 64 MiB more each step", kinds=("memory.pressure",), rank=0, needs=ROOM, says="are full in step"),
    Fault(name="leak", does="the leak has filled the GPU", kinds=("memory.oom",), rank=0, needs=ROOM, says="out of memory"),
    Fault(name="pieces", does="a rank's memory falls to pieces", kinds=("memory.pressure",), rank=1, needs=ROOM, says="lie in pieces"),
    Fault(name="retries", does="a rank's allocator retries", kinds=("memory.pressure",), rank=1, needs=ROOM, says="try again"),
    Fault(name="long_batch", does="one batch is 40 times as long", kinds=("batch.size_outlier",), rank=1, needs=PAIRS),
    Fault(name="long_batch", does="that batch's pairs need 190 GiB", kinds=("memory.oom",), rank=1, needs=PAIRS, says="out of memory"),
    Fault(name="device_assert", does="an index past its table, which no batch holds", kinds=("rank.assert",), rank=1),
    Fault(name="device_assert", does="the driver's event of it", kinds=("gpu.xid",), rank=1, says="Xid 43"),
)
START, REST = 90, 12  # steps before the first fault, and after a lasting one

# Holds are shorter than by default, for faults and clean runs alike: real runs have the time that the suite has not. A clean run is the harder for it.
SETTINGS = """
[rules.straggler]
hold_s = 3.0
keep_s = 1.0
[rules.slow_loader]
hold_s = 2.0
keep_s = 1.0
[rules.loss_spike]
keep_s = 1.0
[rules.memory_fragmented]
hold_s = 3.0
"""


def settings_of(plan: dict[str, Any]) -> str:
    """`watch` in a plan: a rule that is off by default is on there."""
    return SETTINGS + (f"[rules.{plan['watch']}]\nenabled = true\n" if plan.get("watch") else "")


def launches(seed: int) -> list[tuple[dict[str, Any], list[tuple[Fault, int]]]]:
    """Plans with the faults in them, each with its first step: every fault once, at most one that lasts and one that ends in a launch."""
    rng = random.Random(seed)
    lasting = list(LASTING) + [None] * (len(ENDING) - len(LASTING))
    ending = sorted(ENDING, key=lambda fault: (bool(fault.needs), rng.random()))
    return [_launch(pair, seed, rng) for pair in zip(lasting, ending, strict=True)]


def precursor_launches(seed: int) -> list[tuple[dict[str, Any], list[tuple[Fault, int]]]]:
    """Each by itself: what it comes before does not come in these trainings."""
    rng = random.Random(1000 + seed)
    return [_launch((fault,), seed, rng) for fault in PRECURSORS]


def _launch(pair: tuple[Fault | None, ...], seed: int, rng: random.Random) -> tuple[dict[str, Any], list[tuple[Fault, int]]]:
    plan: dict[str, Any] = {"seed": seed, "model": rng.choice(["text", "attention", "norm"]), "batch": rng.choice([4, 8, 16]), "faults": []}
    step, placed = START + rng.randint(0, 20), []
    for fault in pair:
        if fault is not None:
            plan["faults"].append((fault.name, None if fault.rank in (None, ANY) else fault.rank, step, step + (fault.lasts or 1000) - 1))
            if fault.name == "other_collective":
                plan["faults"][-1] = (fault.name, 1, step, step)
            placed.append((fault, step))
            plan |= dict(fault.needs) | ({"watch": fault.watch} if fault.watch else {})
            step += fault.lasts + REST + rng.randint(0, 8)
    plan["steps"] = step + 40
    return plan, placed


def clean_runs() -> list[dict[str, Any]]:
    """Sixty, each another training; twelve with probabilities that nothing keeps inside, and a padded table with its tokenizer; twelve with the rule
    on that is off by default: four of these have data sorted by id, with a table of exactly the rows they need; and six that are restarted in the middle,
    three by a launch that resumes after a preemption, three by the next attempt of torchrun after a rank was killed. What ended these is no finding of
    the clean part, and must be told.
    """
    rng = random.Random(7)
    runs = []
    for number in range(60):
        plan = {
            "seed": 100 + number, "model": rng.choice(["text", "attention", "norm"]), "batch": rng.choice([2, 4, 8, 16, 64]),
            "steps": rng.choice([110, 140, 180]), "evaluate_every": rng.choice([0, 0, 7, 20, 50]), "save_every": rng.choice([0, 0, 10, 40]),
            "accumulate": rng.choice([1, 1, 1, 3]), "clip": rng.random() < 0.4, "scaler": rng.random() < 0.25, "ignored": rng.choice([0, 0, 0.3, 0.9]),
            "lengths": rng.random() < 0.3, "sorted_ids": rng.random() < 0.15, "heavy": rng.random() < 0.2, "decay": rng.random() < 0.4,
            "workers": rng.choice([0, 0, 0, 0, 1]), "pause_s": rng.choice([0.005, 0.02, 0.03]), "lr": rng.choice([0.002, 0.01, 0.03]),
        }  # fmt: skip
        runs.append(plan)
    more = [{**runs[number], "seed": 200 + number, "bce": True, "padded": True} for number in range(12)]
    watched = [{**runs[number], "seed": 300 + number, "sorted_ids": number % 3 == 0, "watch": "ids_creep"} for number in range(12)]
    restarted = [
        {
            **runs[12 + number],
            "seed": 400 + number,
            "scaler": False,
            "steps": 180,
            "restart": ("preempted", "killed")[number % 2],
            "ends_at": 70,
        }
        for number in range(6)
    ]
    return runs + more + watched + restarted
