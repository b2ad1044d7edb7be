# make compare   train the same network with five normalizers, attack it, write a page: runs/compare/report.html
# make test      lint, type check, tests (the docs are built and their examples run)
# make quick     the tests without the slow ones, in under two minutes: for people at work
# make bench     every script of benchmarks/, each writes its CSV beside it; then the pictures of the README
# make docs      the HTML documentation, in docs/_build/html
# make lint      ruff and pyright only
#
# The first call builds a virtual environment in $(VENV); later calls rebuild it only when
# pyproject.toml has changed.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
PYTEST_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help compare test quick bench docs lint format clean

help:
	@sed -n 's/^# \{0,1\}make /make /p' Makefile

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "normlab needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	         "Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev,docs]'
	@touch $@

compare: $(STAMP)
	@$(BIN)/normlab compare --out runs/compare

# One torch thread for each worker: two workers that each start a thread per core slow each other down.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

quick: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -q -m 'not slow' $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Every script of benchmarks/ writes to its own place, or to --out; modules that scripts share begin with an underscore.
bench: $(STAMP)
	@set -e; for script in benchmarks/[!_]*.py; do \
	  test -e "$$script" || { echo "benchmarks/ holds no script" >&2; exit 1; }; \
	  echo "$$script"; $(BIN)/python "$$script"; \
	done

docs: $(STAMP)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo docs/_build/html/index.html

clean:
	rm -rf $(VENV) build dist docs/_build .pytest_cache .ruff_cache .hypothesis
