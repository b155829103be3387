"""Whether the program may make a tensor of what its batch holds before the model gets it, read off its source.

Owns the answer to one question, which is asked once a batch holds an array where every batch before held a tensor: will the model get the array? What the loop
and all that it calls never name cannot happen there. Whatever cannot be read counts as "it may".
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import torch

from torch_watchdog_agent.contract.frames import is_users

__all__ = ["makes_tensors"]

MAX_CALLS = 256
_CONVERTERS = {
    *("as_tensor", "from_numpy", "tensor", "asarray", "array", "from_dlpack", "new_tensor", "frombuffer", "ndarray", "numpy", "tree_map"),
    *("LongTensor", "IntTensor", "FloatTensor", "DoubleTensor", "HalfTensor", "BoolTensor", "ByteTensor", "ShortTensor"),
    *("default_collate", "default_convert", "convert_to_tensors"),
}
_ANYTHING = {"eval", "exec"}
Names: TypeAlias = Mapping[str, Any]
_Arguments: TypeAlias = tuple[Sequence[object], Mapping[str, object]]


class _Unknown(Exception):  # noqa: N818
    """Something in the way of the batch that cannot be read."""


def makes_tensors() -> bool:
    """Whether the loop that asks for a batch just now, or anything that it calls, names what makes tensors."""
    seen: set[CodeType] = set()
    try:
        ways = list(_ways_of_the_batch(sys._getframe(1)))
        return not ways or any(_names_one(tree, names, seen) for tree, names in ways)
    except (_Unknown, OSError, SyntaxError, TypeError, ValueError, RecursionError):
        return True


def _ways_of_the_batch(frame: FrameType | None) -> Iterator[tuple[ast.AST, Names]]:
    """The functions through which the batch goes to the loop, and the loop itself: of the script, in a function that hands nothing on to its caller."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            whole, first = _parsed(frame.f_code)
            loop = _loop_around(whole, frame.f_lineno - first)
            is_the_end = loop is not None and _is_scripts(frame.f_code) and not _hands_on(whole)
            yield loop if is_the_end and loop is not None else whole, {**frame.f_globals, **frame.f_locals}
            if is_the_end:
                return
        frame = frame.f_back


def _is_scripts(code: CodeType) -> bool:
    return "site-packages" not in code.co_filename


def _hands_on(function: ast.AST) -> bool:
    """Whether a function returns or yields anything; those in it are others."""
    nodes = list(ast.iter_child_nodes(function))
    if isinstance(function, ast.Module) and len(nodes) == 1:
        nodes = list(ast.iter_child_nodes(nodes[0]))
    while nodes:
        node = nodes.pop()
        if isinstance(node, (ast.Yield, ast.YieldFrom)) or (isinstance(node, ast.Return) and node.value is not None):
            return True
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            nodes += ast.iter_child_nodes(node)
    return False


def _parsed(code: CodeType) -> tuple[ast.AST, int]:
    """The source of a function or module, and how many lines come before its own first."""
    if code.co_flags & inspect.CO_NEWLOCALS == 0:  # a module
        lines, first = inspect.findsource(code)[0], 0
    else:
        lines, first = inspect.getsourcelines(code)
        first -= 1
    tree = ast.parse(textwrap.dedent("".join(lines)))
    for node in ast.walk(tree):  # what a signature says is not what is done
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.decorator_list, node.returns = [], None
        elif isinstance(node, ast.arg):
            node.annotation = None
    return tree, max(first, 0)


def _loop_around(tree: ast.AST, line: int) -> ast.AST | None:
    """The innermost loop; of one that is left early the outermost, for the batch may be used behind it."""
    loops = [node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.While)) and node.lineno <= line <= (node.end_lineno or 0)]
    if not loops:
        return None
    return loops[0] if any(isinstance(node, ast.Break) for node in ast.walk(loops[-1])) else loops[-1]


def _names_one(tree: ast.AST, names: Names, seen: set[CodeType], *, is_scripts: bool = True) -> bool:
    nodes = list(ast.walk(tree))
    if any(_is_converter(node, names) for node in nodes):
        return True
    parameters = {node.arg for node in nodes if isinstance(node, ast.arg)} if is_scripts else ()
    for node in nodes:
        if isinstance(node, ast.Call):
            called = _meant(node.func, names)
            if called is _NOTHING and isinstance(node.func, ast.Name) and node.func.id in parameters:
                raise _Unknown  # a function that was handed in
            if _is_one(called, seen, _arguments(node, names)):
                return True
    return False


def _arguments(call: ast.Call, names: Names) -> _Arguments:
    return [_meant(argument, names) for argument in call.args], {one.arg: _meant(one.value, names) for one in call.keywords if one.arg}


def _is_converter(node: ast.AST, names: Names) -> bool:
    """An argument may be called `tensor`, too."""
    if isinstance(node, ast.Attribute):
        return node.attr in _CONVERTERS
    return isinstance(node, ast.Name) and node.id in _CONVERTERS | _ANYTHING and callable(_meant(node, names))


def _is_one(called: object, seen: set[CodeType], arguments: _Arguments = ((), {})) -> bool:
    """Whether a thing that is called names what makes tensors; what is torch's own, or written in C, does not (those that do were looked for by name)."""
    if isinstance(called, torch.nn.Module):
        model = _inner(called)
        hooks = (*model._forward_pre_hooks.values(), *torch.nn.modules.module._global_forward_pre_hooks.values())
        if any(_is_one(hook, seen) for hook in hooks):
            return True
        called = model.forward
    if isinstance(called, functools.partial):
        return _is_one(called.func, seen)
    if isinstance(called, type) or called is _NOTHING:
        return False  # what is made anew is no model of the loop's; of what a call returns nothing is known
    by_class = inspect.getattr_static(type(called), "__call__", None)
    if isinstance(by_class, FunctionType):
        called = MethodType(by_class, called)
    own = (called.__self__,) if isinstance(called, MethodType) else ()
    function = inspect.unwrap(called.__func__ if isinstance(called, MethodType) else called)  # type: ignore[arg-type]
    if not isinstance(function, FunctionType) or not is_users(function.__code__.co_filename) or function.__code__ in seen:
        return False
    seen.add(function.__code__)
    if len(seen) > MAX_CALLS:
        raise _Unknown
    given = {**dict(zip(function.__code__.co_varnames, (*own, *arguments[0]), strict=False)), **arguments[1]}
    known = {name: value for name, value in given.items() if value is not _NOTHING}
    around = {**function.__globals__, **inspect.getclosurevars(function).nonlocals, **known}
    return _names_one(_parsed(function.__code__)[0], around, seen, is_scripts=_is_scripts(function.__code__))


def _inner(module: torch.nn.Module) -> torch.nn.Module:
    """The script's own model in torch's wrappers."""
    while not is_users(inspect.getfile(type(module))):
        inner = module._modules.get("module", module._modules.get("_orig_mod"))
        if inner is None:
            break
        module = inner
    return module


_NOTHING = object()


def _meant(node: ast.expr, names: Names) -> object:
    """What an expression is, as far as plain names go; the result of a call has no name."""
    if isinstance(node, ast.Name):
        return names.get(node.id, getattr(builtins, node.id, _NOTHING))
    if isinstance(node, ast.Attribute):
        owner = _meant(node.value, names)
        return _NOTHING if owner is _NOTHING else _attribute(owner, node.attr)
    return _NOTHING


def _attribute(owner: object, name: str) -> object:
    """Runs nothing of the program's."""
    if isinstance(owner, torch.nn.Module) and name in owner._modules:
        return owner._modules[name]
    found = inspect.getattr_static(owner, name, _NOTHING)
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    is_method = isinstance(found, FunctionType) and not isinstance(owner, (type, ModuleType)) and name not in getattr(owner, "__dict__", {})
    return MethodType(found, owner) if is_method and isinstance(found, FunctionType) else found
