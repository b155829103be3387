"""What comes in from others, by a fuzzer that sees which lines its bytes reach.

By hand: `pip install atheris`, then `python tests/proto/fuzz.py PART -max_total_time=60`.

PART is `wire` (messages of nodes and daemons), `stored` (frames of segment files), `frames` (a rank's socket) or `ring` (its shared memory). Anything but the
errors that callers expect, and any record that is not a whole one, ends the run with the bytes that did it.
"""

from __future__ import annotations

import contextlib
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

try:
    import atheris
except ModuleNotFoundError:
    atheris = None  # test_fuzz_parts.py gives the parts bytes without it

with contextlib.nullcontext() if atheris is None else atheris.instrument_imports(include=["torch_watchdog_proto"]):
    from google.protobuf.message import DecodeError

    from torch_watchdog_proto import codec, frames, record
    from torch_watchdog_proto import messages as m
    from torch_watchdog_proto.envelopes import RankSaid
    from torch_watchdog_proto.v1 import control_pb2, telemetry_pb2

CAPACITY = 4
HEADER = record.RingHeader(rank=0, attempt=0, pid=1, world_size=1, start_time_ns=0, capacity=CAPACITY)


def wire(data: bytes) -> None:
    """As gRPC hands it over: parsed, then read."""
    for parse, read in (
        (telemetry_pb2.NodeMessage.FromString, codec.read_node_message),
        (telemetry_pb2.DaemonMessage.FromString, codec.read_daemon_message),
        (control_pb2.ControlUp.FromString, codec.read_control_message),
    ):
        try:
            message = parse(data)
        except DecodeError:
            continue
        try:
            read(message)
        except codec.MalformedMessageError:
            continue


def stored(data: bytes) -> None:
    try:
        codec.read_stored_report(data)
    except codec.MalformedMessageError:
        return


def socket(data: bytes) -> None:
    """In two pieces, as a socket may cut it anywhere."""
    decoder = frames.Decoder()
    try:
        decoder.feed(data[: len(data) // 2])
        decoder.feed(data[len(data) // 2 :])
    except frames.FrameError:
        return


def ring(data: bytes) -> None:
    """Slots with right checksums, so that what lies behind them is reached; then the header itself."""
    buffer = bytearray(record.ring_bytes(CAPACITY))
    record.RingWriter(memoryview(buffer), HEADER)
    for number, start in enumerate(range(0, min(len(data), CAPACITY * 200), 200), 1):
        payload = data[start + 1 : start + 200]
        checked = struct.pack("<HH", data[start], len(payload)) + payload
        offset = record.HEADER_BYTES + (number - 1) * record.RECORD_BYTES
        struct.pack_into("<QI", buffer, offset, number, crc32(checked, number & 0xFFFFFFFF))
        buffer[offset + 12 : offset + 12 + len(checked)] = checked
        struct.pack_into("<Q", buffer, 64, number)
    found, lost = record.RingReader(memoryview(buffer)).read()
    assert len(found) + lost <= CAPACITY
    buffer[: min(len(data), record.HEADER_BYTES)] = data[: record.HEADER_BYTES]
    try:
        record.RingReader(memoryview(buffer)).read()
    except record.RingFormatError:
        return


def seeds() -> list[bytes]:
    """Valid ones to begin with: a parser that is not of Python tells the fuzzer nothing of the way in."""
    block = m.StepBlock(rank=0, attempt=0, pid=1, first_record=1, step=(1, 2), step_ns=(1, 1))
    report = m.NodeReport(
        seq=1,
        time_ns=1,
        steps=m.StepTable.of((block,)),
        gpus=(m.GpuSample(time_ns=1, index=0, uuid="GPU-0", name="g", memory_used_bytes=1, memory_total_bytes=2),),
    )
    hello = m.NodeHello(job="j", node="n", version="0.1.0", policy="stop", command=("train",), run_dir="/r", session="s")
    hold = m.RankHello(rank=0, local_rank=0, world_size=1, pid=1, attempt=0, host="h", version="0.1.0")
    messages = [codec.node_message(one) for one in (hello, report, m.NodeGoodbye(exit_code=0))]
    messages.append(codec.control_message(RankSaid(attempt=0, message=hold)))
    return [*(one.SerializeToString() for one in messages), codec.stored_report("n", "s", report), frames.encode(hold)]


PARTS: dict[str, Callable[[bytes], None]] = {"wire": wire, "stored": stored, "frames": socket, "ring": ring}

if __name__ == "__main__":
    part = PARTS[sys.argv.pop(1)]
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(seeds()):
            Path(corpus, str(number)).write_bytes(seed)
        atheris.Setup([*sys.argv, corpus], part)
        atheris.Fuzz()
