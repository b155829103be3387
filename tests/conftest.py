"""Here so that tests of any folder find the helpers beside it (`fleet_harness`, `services`): pytest puts a conftest's folder on the path."""
