"""The committed protobuf code: it loads here, and it is what the compiler makes of the .proto files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from torch_watchdog_proto.v1 import control_pb2, control_pb2_grpc, query_pb2, query_pb2_grpc, telemetry_pb2, telemetry_pb2_grpc

PROTO = Path(__file__).resolve().parents[2] / "proto"


def test_the_committed_code_loads_under_the_installed_protobuf() -> None:
    for module, service in ((telemetry_pb2, "Telemetry"), (control_pb2, "Control"), (query_pb2, "Query")):
        assert service in module.DESCRIPTOR.services_by_name
    assert telemetry_pb2_grpc.TelemetryStub and control_pb2_grpc.ControlStub and query_pb2_grpc.QueryStub


@pytest.mark.slow
@pytest.mark.timeout(600)  # it installs the compiler
def test_generating_again_changes_nothing(tmp_path: Path) -> None:
    subprocess.run([PROTO / "generate.sh", tmp_path], check=True, timeout=600)
    made = sorted((tmp_path / "torch_watchdog_proto" / "v1").iterdir())
    assert [file.name for file in made] == sorted(file.name for file in (PROTO / "torch_watchdog_proto" / "v1").glob("*_pb2*.py"))
    for file in made:
        assert file.read_bytes() == (PROTO / "torch_watchdog_proto" / "v1" / file.name).read_bytes(), file.name
