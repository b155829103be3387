"""The layout holds: three source roots and nothing else importable, pure cores that stay pure, and sides that load without the other's libraries."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
LONGEST_MODULE = 400
ROOTS = {"proto": "torch_watchdog_proto", "agent": "torch_watchdog_agent", "watchdog": "torch_watchdog"}

PURE = (
    *(
        f"watchdog/torch_watchdog/alerts/{name}.py"
        for name in ("alert", "alertmanager", "desk", "open", "pagerduty", "routes", "silent", "text")
    ),
    "proto/torch_watchdog_proto/messages.py",
    "proto/torch_watchdog_proto/exit_codes.py",
    "proto/torch_watchdog_proto/frames.py",
    "proto/torch_watchdog_proto/checkpoint_names.py",
    "proto/torch_watchdog_proto/names.py",
    "proto/torch_watchdog_proto/sentences.py",
    "proto/torch_watchdog_proto/lost_peers.py",
    "proto/torch_watchdog_proto/record.py",
    "proto/torch_watchdog_proto/rescue_words.py",
    "proto/torch_watchdog_proto/step_words.py",
    "proto/torch_watchdog_proto/violation_words.py",
    "proto/torch_watchdog_proto/stop/*.py",
    "watchdog/torch_watchdog/job/*.py",
    "watchdog/torch_watchdog/rules/*.py",
    "watchdog/torch_watchdog/launch/plan.py",
    "watchdog/torch_watchdog/launch/rendezvous.py",
)

# A core computes: what it may import can neither look at a clock nor reach a file, a socket or another thread. `datetime`, `pathlib` and `signal`
# are there for their types and numbers; IMPURE_CALLS keeps their clocks and files out.
PURE_IMPORTS = {
    *(
        "__future__",
        "array",
        "abc",
        "bisect",
        "collections",
        "copy",
        "dataclasses",
        "datetime",
        "enum",
        "functools",
        "hashlib",
        "heapq",
        "itertools",
        "numpy",  # arithmetic over thousands of ranks at once: DECISIONS.md
    ),
    *(
        "fnmatch",
        "json",
        "math",
        "shlex",
        "operator",
        "pathlib",
        "re",
        "signal",
        "statistics",
        "string",
        "struct",
        "textwrap",
        "types",
        "typing",
        "zlib",
    ),
    *("torch_watchdog_proto.messages", "torch_watchdog_proto.envelopes", "torch_watchdog_proto.frames", "torch_watchdog_proto.record"),
    "torch_watchdog_proto.exit_codes",
    "torch_watchdog_proto.checkpoint_names",
    "torch_watchdog_proto.names",
    "torch_watchdog_proto.sentences",
    "torch_watchdog_proto.lost_peers",
    *(
        "torch_watchdog_proto.rescue_words",
        "torch_watchdog_proto.step_words",
        "torch_watchdog_proto.violation_words",
        "torch_watchdog_proto.stop",
        "torch_watchdog.job",
        "torch_watchdog.rules",
        "torch_watchdog.alerts",
        "torch_watchdog.launch.plan",
    ),
}
PURE_NAMES = {"pathlib": {"PurePath", "PurePosixPath"}}  # of these modules only these
IMPURE_CALLS = {
    *("open", "print", "input", "eval", "exec", "__import__", "breakpoint"),
    *("now", "utcnow", "today", "raise_signal", "alarm", "setitimer", "kill"),  # as attributes: datetime.now(), signal.alarm()
}

OF_THE_OTHER_SIDE = (
    "grpc",
    "google.protobuf",
    "structlog",
    "pydantic",
    "pydantic_settings",
    "click",
    "rich",
    "sqlalchemy",
    "torch_watchdog",
)

BLOCK = """
import importlib, importlib.abc, pkgutil, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == gone or name.startswith(gone + ".") for gone in {absent!r}):
            raise ModuleNotFoundError(f"{{name}} is absent in this test", name=name)

def load(name, *, leave_out=()):
    module = importlib.import_module(name)
    for found in pkgutil.iter_modules(getattr(module, "__path__", ()), name + "."):
        if found.name not in leave_out and not found.name.rpartition(".")[2].startswith("_"):
            load(found.name, leave_out=leave_out)

sys.meta_path.insert(0, Absent())
"""


def pure_modules() -> Iterator[Path]:
    for pattern in PURE:
        found = sorted(REPO.glob(pattern))
        assert found, f"nothing matches {pattern}: was it moved? Then move it in PURE too"
        yield from found


def id_of(path: Path) -> str:
    return str(path.relative_to(REPO))


def imports_of(tree: ast.AST) -> Iterator[tuple[str, str | None, int]]:
    """(module, name or None, line) of every import, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: a relative import; write the full name"
            for alias in node.names:
                yield node.module or "", alias.name, node.lineno


def is_allowed(module: str, name: str | None) -> bool:
    candidates = [module, f"{module}.{name}"]
    listed = any(candidate == ok or candidate.startswith(ok + ".") for candidate in candidates for ok in PURE_IMPORTS)
    return listed and (module not in PURE_NAMES or name in PURE_NAMES[module])


def impurities(source: str) -> list[str]:
    tree = ast.parse(source)
    found = [
        f"line {line}: imports {module}{f'.{name}' if name else ''}"
        for module, name, line in imports_of(tree)
        if not is_allowed(module, name)
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Await | ast.AsyncFunctionDef | ast.AsyncFor | ast.AsyncWith):
            found.append(f"line {node.lineno}: asynchronous")
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in IMPURE_CALLS:
                found.append(f"line {node.lineno}: calls {called}()")
    return found


def test_no_module_is_longer_than_the_house_allows() -> None:
    """A long one is a design question: ARCHITECTURE.md, house rules."""
    modules = [path for root in ROOTS for path in (REPO / root).rglob("*.py") if not path.stem.endswith(("_pb2", "_pb2_grpc"))]
    lengths = {str(path.relative_to(REPO)): len(path.read_text(encoding="utf-8").splitlines()) for path in modules}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_MODULE} == {}


@pytest.mark.parametrize("path", list(pure_modules()), ids=id_of)
def test_a_core_computes_and_nothing_else(path: Path) -> None:
    assert impurities(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "import random",
        "import logging",
        "import os",
        "def f():\n    from torch_watchdog.store import read",
        "from torch_watchdog_proto import codec",
        "from torch_watchdog_proto.v1 import control_pb2",
        "from pathlib import Path",
        "open('x')",
        "print('x')",
        "import datetime\ndatetime.datetime.now()",
        "async def f():\n    await g()",
    ],
)
def test_the_check_of_the_cores_finds_what_it_is_for(source: str) -> None:
    assert len(impurities(source)) >= 1


def test_the_check_of_the_cores_lets_computing_pass() -> None:
    allowed = "import re\nfrom dataclasses import dataclass\nfrom torch_watchdog_proto import messages\nfrom pathlib import PurePath\nre.compile('x')"
    assert impurities(allowed) == []


MAKES_A_TENSOR = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "normal", "ones", "rand", "randint", "randn"),
    *("randperm", "scalar_tensor", "tensor", "zeros"),
}


def without_a_device(source: str) -> list[str]:
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return [
        ast.unparse(call)
        for call in calls
        if ast.unparse(call.func.value) == "torch" and call.func.attr in MAKES_A_TENSOR  # type: ignore[attr-defined]
        if not any(keyword.arg in ("device", None) for keyword in call.keywords)
    ]


@pytest.mark.parametrize("path", sorted((REPO / "agent").rglob("*.py")), ids=id_of)
def test_every_tensor_of_ours_is_made_on_a_named_device(path: Path) -> None:
    """A script may have called torch.set_default_device("cuda"): what names none is made there, or cannot be made at all (pinned memory)."""
    assert without_a_device(path.read_text()) == []


def test_the_check_of_devices_finds_what_it_is_for() -> None:
    found = without_a_device("torch.zeros(3); torch.zeros(3, device='cpu'); torch.empty((), **like); torch.nn.Linear(2, 2)")
    assert found == ["torch.zeros(3)"]


def test_no_two_test_modules_have_one_name() -> None:
    """pytest imports them by their bare names: of two, the second stops the whole run."""
    names = [path.name for path in (REPO / "tests").rglob("*.py") if path.name != "conftest.py" and "scripts" not in path.parts]
    assert sorted(names) == sorted(set(names))


def test_no_source_root_is_a_package() -> None:
    """With `watchdog/__init__.py`, `import watchdog.observers` of the file-events library breaks for everyone who stands in the checkout."""
    assert [root for root in ROOTS if (REPO / root / "__init__.py").exists()] == []


def test_each_source_root_holds_one_package_and_nothing_else_importable() -> None:
    for root, package in ROOTS.items():
        importable = {path.name for path in (REPO / root).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
        assert importable == {package}


@pytest.mark.parametrize(
    "room",
    [*(f"agent/torch_watchdog_agent/{name}" for name in ("checkpoint", "contract", "hooks", "node", "rescue")),
     *("proto/torch_watchdog_proto", "proto/torch_watchdog_proto/stop")],
)  # fmt: skip
def test_the_map_of_a_room_names_all_its_modules(room: str) -> None:
    """In the docstring of the package: whoever enters it finds the way."""
    folder = REPO / room
    words = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    assert {path.stem for path in folder.glob("*.py")} - {"__init__"} - set(re.findall(r"`(\w+)`", words)) == set()


def test_the_wheel_holds_the_three_packages_and_nothing_else_importable(tmp_path: Path) -> None:
    build = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], cwd=REPO, capture_output=True, check=False
    )
    assert build.returncode == 0, build.stderr.decode()
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == set(ROOTS.values())
    assert len([name for name in top if name.endswith(".dist-info")]) == 1
    assert {"torch_watchdog_agent/_shim/sitecustomize.py", "torch_watchdog_proto/incident.schema.json"} <= set(names)
    assert {f"{package}/py.typed" for package in ("torch_watchdog_agent", "torch_watchdog_proto")} <= set(names)  # for who calls restore()
    assert not [name for name in names if "__pycache__" in name]


def run_without(absent: tuple[str, ...], code: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", BLOCK.format(absent=absent) + code], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("module", ["torch_watchdog.daemon.main", "torch_watchdog.cli.main", "torch_watchdog_agent.node.agent"])
def test_outside_the_rank_an_entrance_loads_with_torch_absent(module: str) -> None:
    run_without(("torch",), f"import {module}")


def test_everything_outside_the_rank_loads_with_torch_absent() -> None:
    """But the demo's training script, which is a rank's."""
    run_without(("torch",), "load('torch_watchdog', leave_out=('torch_watchdog.demo.train',)); load('torch_watchdog_agent.node')")


def test_the_rank_side_starts_without_torch_and_without_the_other_sides_libraries() -> None:
    """At interpreter start: what the shim imports must not import torch before the user's script does."""
    run_without(("torch", "numpy", *OF_THE_OTHER_SIDE), "import torch_watchdog_agent.bootstrap, torch_watchdog_agent.keeper")


def test_the_rank_side_loads_with_grpc_protobuf_and_the_like_absent() -> None:
    packages = ("hooks", "contract", "checkpoint", "rescue", "recorder", "gate", "control")
    run_without(OF_THE_OTHER_SIDE, f"[load('torch_watchdog_agent.' + package) for package in {packages}]")


def test_a_launch_starts_without_what_only_other_commands_need() -> None:
    """Each of these takes longer to load than the rest of a launch together, or nearly so."""
    slow = (
        "sqlalchemy",
        "rich",
        "pydantic",
        "pynvml",
        "torch",
        "numpy",
        "starlette",
        "uvicorn",
        "prometheus_client",
        "httpx",
        "apprise",
        "jinja2",
        "pyarrow",
        "tokenizers",
    )
    run_without(slow, "import torch_watchdog.cli.main, torch_watchdog.cli.run, torch_watchdog.launch.run")


def test_what_a_contributor_is_told_to_type_is_there() -> None:
    told, made = (REPO / "CONTRIBUTING.md").read_text(), (REPO / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", made, re.MULTILINE))
    rows = set(re.findall(r"^\| `make ([a-z-]+)`", told, re.MULTILINE))
    assert "venv" in rows and rows <= targets
    (file,) = re.findall(r"`make venv`, then `\.venv/bin/python -m pytest (\S+)`", told)  # one test file
    assert (REPO / file).is_file()
