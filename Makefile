# One command each; every one makes its own environment first when it is missing. `make` alone lists them.
#   make test PYTHON=python3.12    another interpreter (any from 3.11 on; remove .venv first)

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name) 2>/dev/null)))
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
RUNS := $(VENV)/.runs
READY := $(VENV)/.ready

.PHONY: help venv demo test test-e2e test-services test-all check sim bench diagram clean

help:
	@echo "make demo       a two-rank CPU training with a planted bad sample, stopped before it reaches the model: half a minute"
	@echo "make test       the fast tests (CPU only): a few minutes, more on two cores"
	@echo "make test-e2e   real launches (torchrun, accelerate, python; two ranks each): some twenty minutes"
	@echo "make test-services  against real Prometheus, Alertmanager and PostgreSQL (Debian's packages, see .ci/run)"
	@echo "make test-all   the slow ones too"
	@echo "make check      lint, format, types, import rules, purity of the cores"
	@echo "make sim        100,000 schedules of the stop protocol, on all cores: a minute"
	@echo "make bench      what it costs and takes: start-up, a line, a step, a batch, a hold; a daemon with 1,024 ranks; whether anything grows"
	@echo "make diagram    the stop protocol's table and diagram in proto/README.md, from the code"
	@echo "make venv       only the environment in $(VENV), which all the others make first: minutes, for it fetches torch"
	@echo "make clean      remove the environment and what tools left"

venv: $(READY)

# Again only when the dependencies change. torch first and by itself: which build (CPU, CUDA) is the machine's choice, never this project's.
$(RUNS): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, this is $(PYTHON): make PYTHON=..."; exit 1; }
	@echo "making $(VENV) (torch first, which takes minutes where pip has to fetch it) ..."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install -q '$(TORCH)'
	$(BIN)/python -m pip install -q -e .
	@touch $@

# What tests and checks need besides (transformers, Lightning, a browser's driver ...): a first look is not made to wait for it.
$(READY): $(RUNS)
	$(BIN)/python -m pip install -q -e '.[dev]'
	@touch $@

demo: $(RUNS)
	@echo "a training, stopped at a planted bad sample and resumed: about half a minute ..."
	$(BIN)/watchdog demo

test: $(READY)
	@echo "the fast tests: a few minutes, more on two cores ..."
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal -m 'not e2e and not slow and not gpu and not services'

test-e2e: $(READY)
	@echo "real launches, two at a time: some twenty minutes ..."
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m 'e2e and not slow and not gpu and not services'

test-services: $(READY)
	$(BIN)/python -m pytest -m services

test-all: $(READY)
	$(BIN)/python -m pytest -m 'not gpu'

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy proto agent watchdog
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/test_structure.py

# All that take a minute or two; the long ones are commands of their own in BENCHMARKS.md. Their results go where `make clean` finds them.
bench: $(READY)
	$(BIN)/python tests/bench/cost.py
	$(BIN)/python tests/bench/footprint.py
	$(BIN)/python tests/bench/guard.py
	$(BIN)/python tests/bench/hooks.py
	$(BIN)/python tests/bench/window_state.py
	$(BIN)/watchdog --dir build/bench/runs $(BIN)/python tests/bench/step.py
	$(BIN)/watchdog --dir build/bench/runs $(BIN)/python tests/bench/overhead.py --rounds 15
	$(BIN)/python tests/bench/rules.py 16384
	$(BIN)/python tests/bench/latency.py --ranks 2 --orders 20
	$(BIN)/python tests/bench/scan.py --samples 100000
	$(BIN)/python tests/bench/scale.py 1024 --seconds 30 --out build/bench/scale.json
	$(BIN)/python tests/bench/soak.py --steps 100000 --rate 2000 --out build/bench/soak.json

sim: $(READY)
	$(BIN)/python tests/sim/driver.py 100000

diagram: $(READY)
	$(BIN)/python tests/proto/stop_diagram.py

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
