"""Checkpoints from inside the rank: write one at a boundary, take it back in a later run.

Writing: `save` chooses whose code does it: the user's (`callback`), a framework's (`foreign`: `by_trainer`, `by_lightning`, `by_accelerate`, `by_deepspeed`) or
torch's (`dcp`), of what there is to save (`subjects`, `state`, `rng`, `position`, `rank_file`), together (`peers`) or `alone`, whole or in `pieces`; `part` is
one rank's share. `manifest` seals it, by `files` that are whole after a crash; `places` notes where it lies elsewhere; `fingerprint` looks at values, `weights`
whether another's code has written all of them, `errors` says what went wrong, and `refusals` what the system took no more of. Taking it back: `resume`,
`again` (a later attempt), `load`, `alignment`. What a window began with: `window`, `buffers`, and what the script itself has changed since: `hands`, by
content, and `habit`, by torch's count of writes; `schedule` learns where a loop moves its rates, `evaluations` what they move.

The package root imports nothing of torch, so that it can be named before torch is there; each name is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_watchdog_agent.checkpoint.callback import on_checkpoint
    from torch_watchdog_agent.checkpoint.resume import Resumed, restore
    from torch_watchdog_agent.checkpoint.save import save_at

__all__ = ["on_checkpoint", "restore", "Resumed", "save_at"]

_HOMES = {"on_checkpoint": "callback", "restore": "resume", "Resumed": "resume", "save_at": "save"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
