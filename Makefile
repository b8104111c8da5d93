# Each target creates or updates the virtual environment when pyproject.toml or constraints.txt changed.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Without caches of bytecode every process that a test starts compiles windlass again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-bench lint unit bench docs clean help
.DEFAULT_GOAL := help

help:
	@echo "make demo        run a small project on this machine's CPU; writes runs/demo/report.html"
	@echo "make test        format, lint, types, import contracts, all tests except slow ones"
	@echo "make test-all    the same with slow tests"
	@echo "make unit        fast tests only (about 80 seconds)"
	@echo "make lint        static checks only"
	@echo "make test-bench  only the tests of the code in benchmarks/ (published runs, memory trace)"
	@echo "make bench       CPU benchmarks; writes benchmarks/results"
	@echo "make docs        build the documentation site in site/"

# constraints.txt pins the versions that the tests run with.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("windlass needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing windlass into $(VENV) (a minute or two the first time)"
	$(PIP) torch
	$(PIP) -e '.[train,data,dash]'
	@touch $@

$(STAMP): $(READY)
	@echo "installing the test requirements into $(VENV)"
	DS_BUILD_OPS=0 $(PIP) -e '.[train,data,trackers,dash,eval,deepspeed,docs,dev]'
	@touch $@

demo: $(READY)
	$(BIN)/windlass demo

# Four workers on two cores: many tests wait for a scheduler, a browser or a time limit.
test: lint
	$(BIN)/pytest -q -n 4 --dist loadgroup -m "not gpu and not slow" tests benchmarks/tests

test-all: lint
	$(BIN)/pytest -q -n 4 --dist loadgroup -m "not gpu" tests benchmarks/tests

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(STAMP)
	$(BIN)/pytest -q -n 2 -m "not (gpu or slow or multi or slurm or browser or integration)"

test-bench: $(STAMP)
	$(BIN)/pytest -q -n 2 benchmarks/tests

bench: $(STAMP)
	$(BIN)/python benchmarks/run_cpu.py

docs: $(STAMP)
	$(BIN)/python scripts/make_reference.py
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site dist build .mypy_cache .ruff_cache .pytest_cache
