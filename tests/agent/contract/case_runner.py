"""Runs a case's training script in this process, as the one rank that meets the bad sample, with a guard where the hooks would be.

The scripts share `_common`; here a copy of it stands in whose loader hands its batches to the guard and whose process group does not exist.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import runpy
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from guard_loop import Loop
from torch.optim import AdamW
from torch.utils.data import DataLoader

from torch_watchdog_agent.contract import Checked
from torch_watchdog_agent.errors import BadBatchError
from torch_watchdog_proto.messages import Violation

REPO = Path(__file__).resolve().parents[3]
CASES = Path(os.environ.get("TORCH_WATCHDOG_SHARED", REPO.parent / "shared")) / "cases"


class Held(Exception):  # noqa: N818  it stands for the rank that holds
    """The batch would be held at hand-over."""

    def __init__(self, checked: Checked, repaired: object) -> None:
        self.checked, self.repaired = checked, repaired


@dataclasses.dataclass
class Outcome:
    violation: Violation | None = None
    how: str = "ran"
    repaired: bool = False
    warnings: list[Violation] = dataclasses.field(default_factory=list)
    batches: int = 0
    traced: int = 0
    said: list[str] = dataclasses.field(default_factory=list)


class Guarded(DataLoader):
    """A loader whose batches the guard sees first."""

    loop: Loop
    outcome: Outcome

    def __iter__(self) -> Iterator[Any]:
        sampler = iter(self.batch_sampler) if self.batch_sampler is not None else ([index] for index in self.sampler)
        for batch in super().__iter__():
            guard = self.loop.guard
            checked = guard.fetched(batch, indices=list(next(sampler)), worker=None)
            self.outcome.batches += 1
            self.outcome.traced += checked.needs_trace
            self.outcome.warnings += checked.warnings
            if checked.violation is not None:
                raise Held(checked, guard.repaired(batch, checked))
            guard.handed_over(checked, batch)
            yield batch


def _load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _common(rank: int, ranks: int, outcome: Outcome, loop: Loop) -> ModuleType:
    common = _load(CASES / "_common.py", "_common")
    common.RANK, common.WORLD = rank, ranks

    def loader(data: Any, batch_size: int | None, **options: Any) -> DataLoader:
        options.pop("num_workers", None)
        sampler = range(rank, len(data), ranks) if ranks > 1 else None
        made = Guarded(data, batch_size=batch_size, sampler=sampler, **options)
        made.loop, made.outcome = loop, outcome
        return made

    def in_order_trainer(model: Any, data: Any, batch_size: int, **options: Any) -> Any:
        from transformers import Trainer, TrainingArguments

        blocks = range(rank, len(data) // batch_size, ranks)

        class InOrder(Trainer):
            def get_train_dataloader(self) -> DataLoader:
                order = [index for block in blocks for index in range(block * batch_size, (block + 1) * batch_size)]
                made = Guarded(data, batch_size=batch_size, sampler=order, collate_fn=self.data_collator)
                made.loop, made.outcome = loop, outcome
                return made

        arguments = TrainingArguments(
            output_dir=tempfile.mkdtemp(), per_device_train_batch_size=batch_size, learning_rate=1e-3, logging_steps=1, save_strategy="no",
            report_to=[], disable_tqdm=True, use_cpu=True, **options,
        )  # fmt: skip
        return InOrder(model=model, args=arguments, train_dataset=data)

    common.start = lambda seed=0, timeout_s=8: torch.manual_seed(seed)
    common.wrap = lambda model, **options: model
    common.finish = lambda: None
    common.loader, common.in_order_trainer = loader, in_order_trainer
    return common


def expected_of(case: str) -> dict[str, Any]:
    return json.loads((CASES / case / "expected.json").read_text())


def run_case(case: str) -> Outcome:
    """One case to its end, or to the batch that is held or refused."""
    expected, outcome = expected_of(case), Outcome()
    ranks = expected["expect"].get("rank", 0)
    rank = ranks if isinstance(ranks, int) else ranks[-1]
    loop = Loop(torch.nn.Identity(), lambda model, batch: None)
    outcome.said = loop.said
    step, before = AdamW.step, sys.modules.get("_common")

    def gated(self: Any, *args: Any, **kwargs: Any) -> Any:
        loop.guard.step_ended()
        return step(self, *args, **kwargs)

    sys.modules["_common"] = _common(rank, expected["launch"]["nproc"], outcome, loop)
    AdamW.step = gated
    try:
        runpy.run_path(str(CASES / case / "train.py"), run_name="__main__")
    except Held as held:
        outcome.violation, outcome.how, outcome.repaired = held.checked.violation, "held", held.repaired is not None
    except BadBatchError as error:
        outcome.violation, outcome.how = error.violation, "refused"
    except (ValueError, RuntimeError, IndexError) as error:
        outcome.violation, outcome.how = loop.guard.diagnose(error), f"{type(error).__name__}: {error}"
    finally:
        AdamW.step = step
        sys.modules.pop("_common", None)
        if before is not None:
            sys.modules["_common"] = before
    return outcome


def scored(case: str, violation: Violation) -> Any:
    """The case's own scorer on an incident made of this violation."""
    sys.modules.setdefault("run_cases", _load(CASES / "run_cases.py", "run_cases"))
    import run_cases

    expected = expected_of(case)
    facts = json.loads(json.dumps(dataclasses.asdict(violation)))
    expect = expected["expect"]
    step = expect.get("step")
    incident = {
        **facts, "origin": {"rank": rank if isinstance(rank := expect.get("rank"), int) else rank[-1]}, "step": step[0] if isinstance(step, list) else step,
        "action": {"prevented": expect.get("prevented", True)},
    }  # fmt: skip
    return run_cases.score(expected, run_cases.Run(65, 0, 1.0, [incident]))
