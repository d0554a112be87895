# Two commands on a fresh machine: `make demo` and `make test`. Each makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SOURCES := src tests benchmarks examples docs

.PHONY: help demo test test-integrations test-kills fuzz chaos lint format bench bench-quick bench-drop-in bench-overlap bench-sharded bench-backward bench-checkpoint bench-host bench-scale bench-communication bench-gpu docs clean
help:
	@echo "make demo    two local ranks, plain DDP and sharded side by side"
	@echo "make test    the whole test suite"
	@echo "make test-integrations   Trainer, Accelerate, Lightning, Fabric and optimizer packages, in an environment of their own"
	@echo "make test-kills   200 saves that are killed, over two and four ranks"
	@echo "make fuzz MINUTES=10 WORLDS=2,3 SEED=0   random training programs, compared with plain DDP"
	@echo "make chaos ROUNDS=1 LOAD=0 SEED=0   every fault in every mode, ROUNDS times, beside LOAD busy loops"
	@echo "make lint    formatting, lint rules, types, import directions and spelling"
	@echo "make format  rewrite the sources in the project's format"
	@echo "make bench-quick   the main entries on two models and two ranks, in two minutes"
	@echo "make bench   all cases and peers, checkpoints and scale, in fifteen minutes"
	@echo "make bench-drop-in, -overlap, -sharded, -backward, -checkpoint, -host, -scale, -communication, -gpu   each alone, at length"
	@echo "make docs    the documentation as a site, in build/docs; warnings are errors"

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e ".[cli,dev]"
	@touch $@

demo: $(VENV)/installed
	$(BIN)/zerostep demo

# Two workers, each with ranks of its own: while the ranks of one wait for each other, the other computes.
test: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 --dist worksteal

# Frameworks bring many packages of their own, so they have an environment of their own.
FRAMEWORKS := .venv-integrations
$(FRAMEWORKS)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e ".[integrations,optimizers]" pytest pytest-timeout pytest-xdist
	@touch $@

test-integrations: $(FRAMEWORKS)/installed
	$(FRAMEWORKS)/bin/python -m pytest -n 2 --dist loadfile tests/integrations/frameworks

test-kills: $(VENV)/installed
	$(BIN)/python -m pytest -m slow tests/checkpoint/test_kills.py

MINUTES ?= 10
WORLDS ?= 2,3
SEED ?= 0
fuzz: $(VENV)/installed
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) --world $(WORLDS) --seed $(SEED)

ROUNDS ?= 1
LOAD ?= 0
chaos: $(VENV)/installed
	$(BIN)/python -m tests.chaos --rounds $(ROUNDS) --load $(LOAD) --seed $(SEED) --json build/chaos.json

lint: $(VENV)/installed
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

format: $(VENV)/installed
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

$(VENV)/peers: $(VENV)/installed
	DS_BUILD_OPS=0 $(PIP) -e ".[bench]"
	@touch $@

# The network is shaped where that is possible, which takes root and iproute2; elsewhere it is loopback, and says so.
SHARDED := $(BIN)/python -m benchmarks.sharded --network auto
RUN := benchmarks/results/$(shell date +%F)-bench
MAIN := torch-view,forward
BACKWARD := ddp-tuned,fsdp2,interleaved,forward,backward,backward-step
PEERS := ddp-tuned,torch-view,fsdp2,deepspeed-1,deepspeed-2,fairscale,drop-in,forward,step,forward-fused

bench-quick: $(VENV)/installed
	$(SHARDED) --case gpt,tiny --peers $(MAIN) --rounds 4 --json $(RUN)-quick.json --plot $(RUN)-quick.png

bench: $(VENV)/peers
	$(SHARDED) --case gpt,tiny --rounds 3 --steps 1 --json $(RUN).json --plot $(RUN).png
	$(SHARDED) --case frozen --peers $(PEERS) --rounds 3 --steps 1 --json $(RUN)-frozen.json --plot $(RUN)-frozen.png
	$(SHARDED) --case wide --batch 2048 --peers $(PEERS) --rounds 3 --steps 1 --json $(RUN)-wide.json --plot $(RUN)-wide.png
	$(SHARDED) --case gpt --ranks 4 --peers $(MAIN) --rounds 3 --steps 1 --json $(RUN)-4.json --plot $(RUN)-4.png
	$(BIN)/python -m benchmarks.scale --json $(RUN)-scale.json
	$(BIN)/python -m benchmarks.checkpoint --gigabytes 0.25 --rounds 2 --json $(RUN)-checkpoint.json

bench-drop-in: $(VENV)/installed
	$(BIN)/python -m benchmarks.drop_in

bench-overlap: $(VENV)/installed
	$(BIN)/python -m benchmarks.overlap --network shaped

bench-sharded: $(VENV)/peers
	$(BIN)/python -m benchmarks.sharded --network shaped --ranks 2,4

bench-backward: $(VENV)/installed
	$(SHARDED) --case gpt,tiny --ranks 2,4 --peers $(BACKWARD) --json $(RUN)-backward.json --plot $(RUN)-backward.png

bench-checkpoint: $(VENV)/installed
	$(BIN)/python -m benchmarks.checkpoint

bench-host: $(VENV)/installed
	$(BIN)/python -m benchmarks.host --json $(RUN)-host.json

bench-scale: $(VENV)/installed
	$(BIN)/python -m benchmarks.scale --model small,large

bench-communication: $(VENV)/installed
	$(BIN)/python -m benchmarks.communication

bench-gpu: $(VENV)/installed
	$(BIN)/python -m benchmarks.gpu

$(VENV)/docs: $(VENV)/installed
	$(PIP) -e ".[docs]"
	@touch $@

docs: $(VENV)/docs
	$(BIN)/python -m sphinx -W --keep-going -n -q -d build/doctrees docs build/docs

clean:
	rm -rf build $(VENV) $(FRAMEWORKS) .mypy_cache .ruff_cache .pytest_cache .hypothesis
