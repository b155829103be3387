#!/bin/sh
# Regenerates torch_watchdog_proto/v1. The compiler is old on purpose: its output loads under every protobuf from 4.25 on, which training images
# pin; the output of a new compiler does not. Needs Python 3.11 (the old wheel); pass another with PYTHON=..., or an environment that has the
# compiler already with TOOLS=FOLDER.
set -eu
root=$(cd "$(dirname "$0")" && pwd)
out=${1:-$root}
tools=${TOOLS:-}
if [ -z "$tools" ]; then
    tools=$(mktemp -d)
    trap 'rm -rf "$tools"' EXIT
    "${PYTHON:-python3.11}" -m venv "$tools"
    "$tools/bin/pip" install -q "grpcio-tools==1.62.3" "setuptools<81"
fi
cd "$root"
PATH="$tools/bin:$PATH" "$tools/bin/python" -m grpc_tools.protoc -I . \
    --python_out="$out" --grpc_python_out="$out" torch_watchdog_proto/v1/*.proto
