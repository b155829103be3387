"""Learns what a model can take from the user's own steps, and checks batches against it. `Guard` is all that the hooks need; START HERE: `guard`.

A batch is taken apart (`flatten`, `forms`, `signature`), and held against the checks of its kind (`plans`, `plan`, `kinds`, `check`; `ready`: the hot path)
and against what was usual so far (`findings`, `fits`, `handling`); what comes of it: `verdict`, `checked`. One on a device: `placement`, `ondevice`, `mailbox`,
`reading`.

Checks are learned in traced steps: `tracing` pushes the `mode` that fills a `tape` (`nodes`, `conversions`) with what operators take (`consumers`,
`watchers`, `stretched`), where (`frames`) and in which call of the model (`calls`); `learn` makes `rules` with `bounds` of it, by each index's `recipe` and
`sizes`, which `replay` runs and `discharge` proves needless. A person's own: `declared`. All of them for people: `table`, `file`.

Once a batch is bad: `repair` makes a stand-in; `origin` and `where` find the cell and the sample; `explain`, `facts`, `causes`, `wrong_values` and `words` say
it. After an exception: `aftermath`, `misfit`; after a loss that is no number: `inside`.
"""

from torch_watchdog_agent.contract.check import TensorStat
from torch_watchdog_agent.contract.guard import Checked, Guard

__all__ = ["Checked", "Guard", "TensorStat"]
