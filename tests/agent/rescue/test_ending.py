"""How a script ends: an exit with a bad status is known at interpreter exit, whichever way it came; one that was caught, or a good one, is none."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

BEFORE = """
import atexit, sys
from torch_watchdog_agent.rescue.ending import Ending, hear_exits
batches = 0
ending = Ending()
def asked(status):
    error = ending.exit_asked(status, batches=batches)
    return None if error is None else lambda: ending.gone(error)
hear_exits(asked)
def told():
    found = ending.taken(batches=batches)
    print("told" if found else "nothing", *(found[1].chain if found else ()), found[1].where.rpartition("/")[2] if found else "", sep="|")
atexit.register(told)
"""


def ended(folder: Path, body: str, *options: str) -> tuple[int, str]:
    path = folder / "script.py"
    path.write_text(f"exec(compile({BEFORE!r}, '<before>', 'exec'))\n" + textwrap.dedent(body))
    done = subprocess.run([sys.executable, *(options or [str(path)])], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout.strip()


@pytest.mark.parametrize(
    ("body", "code", "text"),
    [
        ("sys.exit(3)", 3, "SystemExit: 3"),
        ("exit(3)", 3, "SystemExit: 3"),
        ("sys.exit('no data')", 1, "SystemExit: no data"),
        ("try:\n    sys.exit(3)\nfinally:\n    batches += 0", 3, "SystemExit: 3"),
        ("def main():\n    with open('x', 'w'):\n        sys.exit(2)\nmain()", 2, "SystemExit: 2"),
    ],
)
def test_a_bad_exit_is_known_with_its_line(tmp_path: Path, body: str, code: int, text: str) -> None:
    line = 2 + next(number for number, line in enumerate(body.splitlines()) if "exit(" in line)
    assert ended(tmp_path, body) == (code, f"told|{text}|script.py:{line}")


def test_a_module_that_is_run_by_its_name_too(tmp_path: Path) -> None:
    (tmp_path / "script.py").touch()
    code, out = ended(tmp_path, "sys.exit(3)", "-m", "script")
    assert (code, out.split("|")[:2]) == (3, ["told", "SystemExit: 3"])


def test_the_error_that_is_handled_meanwhile_is_the_failure(tmp_path: Path) -> None:
    body = "try:\n    raise RuntimeError('Connection closed by peer')\nexcept RuntimeError:\n    sys.exit(1)"
    code, out = ended(tmp_path, body)
    assert (code, out.split("|")[:3]) == (1, ["told", "RuntimeError: Connection closed by peer", "SystemExit: 1"])


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("batches += 1", 0),
        ("sys.exit()", 0),
        ("sys.exit(0)", 0),
        ("try:\n    sys.exit(3)\nexcept SystemExit:\n    batches += 0", 0),
        ("try:\n    sys.exit(3)\nexcept SystemExit:\n    sys.exit(0)", 0),
        ("try:\n    sys.exit(3)\nexcept SystemExit:\n    batches += 1\nraise SystemExit(0)", 0),
        ("def main():\n    try:\n        sys.exit(2)\n    except SystemExit:\n        return 0\nraise SystemExit(main())", 0),
        ("try:\n    sys.exit(2)\nexcept SystemExit as error:\n    kept = error\nraise SystemExit(0)", 0),
        ("try:\n    raise KeyboardInterrupt\nexcept KeyboardInterrupt:\n    sys.exit(130)", 130),
    ],
)
def test_an_end_that_is_no_failure_is_not_told(tmp_path: Path, body: str, code: int) -> None:
    assert ended(tmp_path, body) == (code, "nothing|")


def test_what_the_script_held_goes_when_it_says_so_and_not_when_we_do(tmp_path: Path) -> None:
    body = """
    import weakref
    class Model: pass
    def train():
        model = Model()
        weakref.finalize(model, print, "freed")
        sys.exit(3)
    try:
        train()
    except SystemExit:
        print("caught")
    print("end")
    """
    assert ended(tmp_path, body)[1].split() == ["caught", "freed", "end", "nothing|"]
