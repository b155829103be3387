"""Here so that tests of any folder find the helpers beside it (`fleet_harness`, `services`): pytest puts a conftest's folder on the path."""

import signal
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is: three test files had switched that off already, another failed by it.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# A shell starts what it puts into the background with SIGINT ignored, and every process below inherits that: Ctrl-C could not be tested.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A word of a test's name -> what the script that it starts imports, and a machine with torch and transformers may still lack.
PACKAGES = {"lightning": "lightning", "stateful": "torchdata"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lacking = {word: package for word, package in PACKAGES.items() if find_spec(package) is None}
    for item in items:
        for word, package in lacking.items():
            if word in item.name:
                item.add_marker(pytest.mark.skip(reason=f"not installed here: pip install {package}"))
