#!/usr/bin/env bash
# Starts two ranks of a Python script, each in a session of its own, as torchrun does, without loading torch itself: the suite starts hundreds.
# PYTHON and MASTER_PORT come from the suite. A rank that fails gives the other ten seconds.
export WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1
RANK=0 LOCAL_RANK=0 setsid "$PYTHON" "$@" & first=$!
RANK=1 LOCAL_RANK=1 setsid "$PYTHON" "$@" & second=$!
code=0
wait -n $first $second || code=$?
if [ $code != 0 ]; then
    (sleep 10; kill -TERM $first $second) 2>/dev/null & timer=$!
fi
wait $first || code=$?
wait $second || code=$?
[ -z "${timer:-}" ] || kill $timer 2>/dev/null
exit $code
