# Penstock: `make help` lists what there is. Every target sets up what it needs; nothing is done by hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_OUT ?= runs/demo
DEMO_ARGS ?=
READY := $(VENV)/.ready
PEERS := $(VENV)/.peers
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format bench torture clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 18

$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing penstock and what it needs (a few minutes the first time)"
	@$(PIP) --editable '.[torch,dev]'
	@touch $@

$(PEERS): $(READY)
	@echo "installing the peers that the benchmarks compare with"
	@$(PIP) --editable '.[torch,dev,peers]'
	@# litdata brings a torchvision that doesn't load beside a CPU build of torch, and then transformers doesn't either.
	@$(BIN)/python -m pip --disable-pip-version-check uninstall --quiet --yes torchvision
	@touch $@

setup: $(READY)  ## create .venv and install everything, at pinned versions

demo: $(READY)  ## raw code -> tokens -> trained model -> page, on the embedded default
	@$(BIN)/penstock run --out $(DEMO_OUT) $(DEMO_ARGS)

# One thread per worker process: PyTorch's own threads would fight over the cores that the workers share.
test: $(READY)  ## all tests, with a sample of the torture
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

check: $(READY)  ## formatting, lint, types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(READY)  ## rewrite to the house format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(PEERS)  ## every figure against its peer; writes benchmarks/results and renders docs/benchmarks.md
	@$(BIN)/python benchmarks/run_all.py

torture: $(READY)  ## the full fault figures (hours), or LANES=AB; writes benchmarks/results and docs/reliability.md
	@$(BIN)/python benchmarks/torture.py $(LANES)

clean:  ## remove the environment, caches and demo runs
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .hypothesis build dist
	find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
