"""Here so that tests of any folder find the helpers beside it (`fleet_harness`, `services`): pytest puts a conftest's folder on the path."""

import signal

# A shell starts what it puts into the background with SIGINT ignored, and every process below inherits that: Ctrl-C could not be tested.
signal.signal(signal.SIGINT, signal.default_int_handler)
