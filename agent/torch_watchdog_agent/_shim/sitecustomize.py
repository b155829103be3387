"""Alone in its folder, first on PYTHONPATH of a wrapped launch: starts the agent, then makes way for the user's own sitecustomize."""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

_here = Path(__file__).resolve().parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _here]


def _activate():
    try:
        import torch_watchdog_agent.bootstrap as bootstrap
    except ImportError:  # a Python in which we are not installed: our sources are beside this file
        sources = [str(_here.parents[1])]
        if _here.parents[1].name == "agent":
            sources.append(str(_here.parents[2] / "proto"))
        sys.path.extend(sources)
        try:
            import torch_watchdog_agent.bootstrap as bootstrap
        except Exception as error:
            if sys.stderr is not None:
                sys.stderr.write(f"[torch-watchdog] this Python runs without the watchdog ({type(error).__name__}: {error})\n")
            return
    bootstrap.activate()


_activate()
_theirs = PathFinder.find_spec("sitecustomize", sys.path)
if _theirs is not None and _theirs.loader is not None:
    _module = module_from_spec(_theirs)
    sys.modules["sitecustomize"] = _module
    _theirs.loader.exec_module(_module)
