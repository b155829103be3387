"""Who asks, in words, whatever the machine knows of its users."""

from __future__ import annotations

import getpass
import os

import pytest

from torch_watchdog.user import caller


@pytest.mark.parametrize("error", [KeyError("getpwuid(): uid not found: 54321"), OSError("No username set in the environment")])
def test_a_user_id_without_a_name_is_told_by_its_number(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def no_name() -> str:
        raise error

    monkeypatch.setattr(getpass, "getuser", no_name)
    assert caller().startswith(f"{os.getuid()}@")
