# Two commands on a fresh machine: `make demo` and `make test`. Each makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SOURCES := src tests benchmarks examples

.PHONY: help demo test lint format bench bench-overlap bench-sharded clean
help:
	@echo "make demo    two local ranks, plain DDP and sharded side by side"
	@echo "make test    the whole test suite"
	@echo "make lint    formatting, lint rules and types"
	@echo "make format  rewrite the sources in the project's format"
	@echo "make bench   step time and consolidation against torch's own optimizer, in one run"
	@echo "make bench-overlap   the step inside backward on a shaped network (root and iproute2)"
	@echo "make bench-sharded   the training step against every peer on a shaped network (root and iproute2)"

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e ".[cli,dev]"
	@touch $@

demo: $(VENV)/installed
	$(BIN)/zerostep demo

test: $(VENV)/installed
	$(BIN)/python -m pytest

lint: $(VENV)/installed
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy

format: $(VENV)/installed
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks.drop_in

bench-overlap: $(VENV)/installed
	$(BIN)/python -m benchmarks.overlap --network shaped

$(VENV)/peers: $(VENV)/installed
	DS_BUILD_OPS=0 $(PIP) -e ".[bench]"
	@touch $@

bench-sharded: $(VENV)/peers
	$(BIN)/python -m benchmarks.sharded --network shaped --ranks 2,4

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
