"""The stop protocol as two pure state machines: `coordinator` is the daemon's half, `participant` the rank's. ../README.md says it in words."""
