"""`python -m torch_watchdog.cli`: the program `watchdog`, where its script is not on PATH."""

from torch_watchdog.cli.main import main

main()
