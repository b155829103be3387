"""What a rank leaves behind by itself: the stacks of a crash in native code, and exceptions of its other threads; the script's own hooks stay in force."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path


def run(folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    begin = "import ctypes, faulthandler, threading\nfrom pathlib import Path\nfrom torch_watchdog_agent.rescue import evidence\n"
    begin += f"here = Path({str(folder)!r})\n"
    return subprocess.run([sys.executable, "-c", begin + body], capture_output=True, text=True, timeout=60, check=False)


def test_a_crash_in_native_code_leaves_the_python_stack_of_every_thread(tmp_path: Path) -> None:
    body = """
evidence.keep_stacks(here, 3)
def waiting(): threading.Event().wait()
threading.Thread(target=waiting, daemon=True).start()
def crash(): ctypes.string_at(0)
crash()
"""
    assert run(tmp_path, body).returncode == -signal.SIGSEGV
    stacks = (tmp_path / "logs" / "rank-3.stacks").read_text()
    assert "Segmentation fault" in stacks and "in crash" in stacks and "in waiting" in stacks


def test_a_script_that_has_its_stacks_elsewhere_keeps_them_there(tmp_path: Path) -> None:
    done = run(tmp_path, "faulthandler.enable()\nevidence.keep_stacks(here, 0)\nctypes.string_at(0)\n")
    assert "Segmentation fault" in done.stderr
    assert not (tmp_path / "logs").exists()


def test_an_exception_of_another_thread_is_noted_and_the_scripts_own_hook_hears_it_too(tmp_path: Path) -> None:
    body = """
threading.excepthook = lambda args: print("theirs", args.exc_value)
evidence.hear_threads(lambda name, error: print("noted", name, repr(error)))
def fail(): raise KeyError("label")
thread = threading.Thread(target=fail, name="feeder")
thread.start()
thread.join()
"""
    assert run(tmp_path, body).stdout.splitlines() == ["noted feeder KeyError('label')", "theirs 'label'"]
