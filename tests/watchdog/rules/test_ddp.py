"""DDP's own errors are told by their text, with what to change; other errors are not taken for one."""

from __future__ import annotations

import pytest

from torch_watchdog.job.first_failure import FirstFailure, RankEnd
from torch_watchdog.rules.ddp import ddp_error
from torch_watchdog.rules.death import judge


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("Expected to mark a variable ready only once. This error is caused by one of the following reasons: 1) Use of a module parameter", "use_reentrant"),
        ("Parameter at index 3 with name b.weight has been marked as ready twice. This means that multiple autograd engine hooks", "use_reentrant"),
        ("Expected to have finished reduction in the prior iteration before starting a new one.", "find_unused_parameters=True"),
        ("Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration", "static_graph"),
        ("DDP expects same model across all ranks, but Rank 0 has 4 params, while rank 1 has inconsistent 6 params.", "same configuration"),
        ("[1]: params[0] in this process with sizes [9, 8] appears not to match sizes of the same param in process 0.", "same configuration"),
        ("DistributedDataParallel is not needed when a module doesn't have any parameters that require a gradient.", "unfreeze"),
    ],
)  # fmt: skip
def test_a_known_error_says_what_to_change(text: str, word: str) -> None:
    known = ddp_error(f"RuntimeError: {text}")
    assert known is not None
    assert word in known.fix
    end = RankEnd(rank=1, node="a", pid=1, exit_code=1, step=0, text=f"RuntimeError: {text}")
    verdict = judge(FirstFailure(culprits=(end,), victims=(0,)))
    assert (verdict.kind, verdict.cause, verdict.fix) == ("config.ddp", known.cause, known.fix)


@pytest.mark.parametrize("text", ["", "RuntimeError: shape '[2, 3]' is invalid for input of size 7", "ValueError: no image"])
def test_any_other_error_is_none_of_them(text: str) -> None:
    assert ddp_error(text) is None
