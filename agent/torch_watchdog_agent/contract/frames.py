"""Where in the program an operator was called, read off the live frames: module path, source lines, Python op. No hooks needed."""

from __future__ import annotations

import os
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

__all__ = ["ModuleNames", "Place", "is_users", "place_of_call", "user_line"]

_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).resolve().parent.parent) + os.sep
# Between an operator and its caller.
_BETWEEN = tuple(_TORCH + part for part in ("_dynamo", "_compile.py", "utils", "_ops.py", "_tensor.py"))
_FUNCTIONAL = f"nn{os.sep}functional.py"
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """`module` is the path of the innermost named module; `source` is the innermost line outside of torch; `call` tells calls of one line apart."""

    module: str | None
    source: str
    op: str | None
    call: tuple[str, int]
    holder: Any = None  # weak reference to that module


class ModuleNames:
    """Paths of modules under every root seen so far, as a user would write them (without DDP's `module.` and compile's `_orig_mod.`)."""

    def __init__(self) -> None:
        self._paths: dict[int, tuple[Any, str]] = {}
        self.roots: list[Any] = []

    def learn(self, root: torch.nn.Module) -> None:
        """Name all modules under `root`; an outer root renames those of an inner one. Idempotent."""
        if any(known() is root for known in self.roots):
            return
        self.roots = [known for known in self.roots if known() is not None] + [weakref.ref(root)]
        self._paths = {number: known for number, known in self._paths.items() if known[0]() is not None}
        wrapped = isinstance(getattr(root, "module", None), torch.nn.Module)
        for path, module in root.named_modules():
            self._paths[id(module)] = (weakref.ref(module), _plain(path, wrapped=wrapped))

    def path(self, module: torch.nn.Module) -> str | None:
        known = self._paths.get(id(module))
        return known[1] if known is not None and known[0]() is module else None

    def training(self) -> frozenset[bool]:
        """The training flags of the roots that live, each once: copies of a model come, and go when the garbage collector looks."""
        flags = set()
        for known in self.roots:  # asked before each batch: a comprehension would be a call more
            root = known()
            if root is not None:
                flags.add(root.training)
        return frozenset(flags)


def _plain(path: str, *, wrapped: bool) -> str:
    parts = [part for part in path.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:] if wrapped and parts and parts[0] == "module" else parts)


def _module_of(frame: FrameType) -> torch.nn.Module | None:
    """The module whose method this frame runs. Looks into the locals only where the first name is `self`: reading locals keeps them alive."""
    code = frame.f_code
    if not code.co_argcount or code.co_varnames[0] != "self":
        return None
    owner = frame.f_locals.get("self")
    return owner if isinstance(owner, torch.nn.Module) else None


def place_of_call(names: ModuleNames, depth: int = 1) -> Place:
    """The place that called an operator. `depth`: frames of ours to skip."""
    path: str | None = None
    holder: torch.nn.Module | None = None
    source: str | None = None
    op: str | None = None
    call: tuple[str, int] | None = None
    unnamed: torch.nn.Module | None = None
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_OURS):
            if call is None and not name.startswith(_BETWEEN):
                call = (name, frame.f_lasti)
            if name.endswith(_FUNCTIONAL) and source is None:
                op = frame.f_code.co_name
            if source is None and not name.startswith(_TORCH):
                source = f"{name}:{frame.f_lineno}"
        module = _module_of(frame)
        if module is not None:
            known = names.path(module)
            unnamed = module if known is None else unnamed
            if not path and known:
                path, holder = known, module
        frame = frame.f_back
    if unnamed is not None and path is None:
        return _named_from(names, unnamed, depth + 1)
    return Place(
        module=path or None, source=source or "?", op=op, call=call or ("", -1), holder=weakref.ref(holder) if holder is not None else None
    )


def is_users(file: str) -> bool:
    """Whether a source file is neither torch's nor ours."""
    return not file.startswith((_TORCH, _OURS))


def user_line() -> str:
    """`file:line` of the innermost frame that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "?"


def _named_from(names: ModuleNames, outermost: torch.nn.Module, depth: int) -> Place:
    """Take the outermost module of the frames for a root, once, and look again."""
    if names.path(outermost) is None:
        names.learn(outermost)
        return place_of_call(names, depth + 1)
    return Place(module=None, source="?", op=None, call=("", -1))
