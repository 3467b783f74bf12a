# Two commands for a newcomer: `make demo` (train a real model, no GPU needed) and `make test`.
PYTHON ?= python3
# A smaller torch where PyTorch's CPU index is reachable:
#   make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS)
# Idle OpenMP threads sleep rather than spin: on shared cores spinning cost up to four times the wall time.
export OMP_WAIT_POLICY ?= passive

.PHONY: demo test test-slow lint venv clean

demo: venv
	$(BIN)/qerl demo

venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"qerl needs Python 3.11 or newer, {sys.executable} is {v.major}.{v.minor}: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt pip
	$(PIP) -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -c constraints.txt --group dev
	touch $@

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/python scripts/check_size.py

test: lint
	$(BIN)/pytest -m "not slow and not gpu" -n logical --maxprocesses 4 --dist worksteal

# Groups: tests of one short run of the demo stay in one process.
test-slow: $(VENV)/.installed-dev
	$(BIN)/pytest -m "slow and not gpu" -n logical --maxprocesses 4 --dist loadgroup

clean:
	rm -rf $(VENV)
