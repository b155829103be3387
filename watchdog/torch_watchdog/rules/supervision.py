"""batch.empty, before it comes: fewer and fewer labels are supervised, until a batch has none and its mean loss is 0/0.

Only a share that was larger before is a sign: fine-tuning on short answers supervises a few per cent of all tokens, and is right.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from torch_watchdog.rules.settings import Timing, share_of
from torch_watchdog.rules.sign import About, Rule, Sign
from torch_watchdog.rules.streams import STEPS, View
from torch_watchdog.rules.windows import medians

__all__ = ["RULE", "Settings"]

_RECENT = 12  # steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Timing):
    """Fires where the newest 12 batches supervise less than `left` of what those before did, and less than `share` of their labels."""

    left: float = share_of(0.1)
    share: float = share_of(0.05)


ABOUT = About(
    name="supervision",
    kind="batch.empty",
    watches="the share of each label tensor that is not the ignored value",
    says="rank 0, step 300: 0.4 % of labels are supervised, the batches before had 38 % (limit 3.8 %)",
)


def judge(view: View, settings: Settings) -> Iterable[Sign]:
    for key, seen in view.keys.items():
        rows = seen.kept.full()
        rows = rows[seen.kept.newest()[rows] < settings.share]
        values = seen.kept.ordered(rows)
        before, recent = medians(values[:, : STEPS - _RECENT]), medians(values[:, -_RECENT:])
        for at in np.flatnonzero((recent < settings.share) & (recent < settings.left * before)):
            yield _sign(view.ranks[rows[at]], int(seen.steps.newest()[rows[at]]), key, before[at], recent[at], settings)


def _sign(rank: int, step: int, key: str, before: float, recent: float, settings: Settings) -> Sign:
    return Sign(
        rank=rank,
        step=step,
        subject=key,
        said=f"rank {rank}, step {step}: {100 * recent:.2g} % of {key} are supervised, the batches before had "
        f"{100 * before:.2g} % (limit {100 * settings.left * before:.2g} %)",
        cause="nearly all labels are the ignored value: the next batch may have none, and a mean over none is NaN",
        fix="look at how labels are masked for the samples that come now (truncation that cuts the answer off, another template)",
    )


RULE = Rule(about=ABOUT, settings=Settings, judge=judge, each_stretch=True, each_rank=True)
