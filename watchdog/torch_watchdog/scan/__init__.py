"""`watchdog scan`: what the ranks of a scan leave in its run directory, and how that is told."""
