# One command per job, the same by hand and in continuous integration. `make help` lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
# Extras to install, such as EXTRAS=dev,cuda on a GPU host or EXTRAS=dev,tpu on a TPU VM; the default runs on the CPU.
EXTRAS ?= dev
# The Python to build the environment with; the first one that works.
PYTHONS ?= python3.13 python3.12 python3.11 python3 python
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(EXTRAS)

.PHONY: help setup quickstart smollm2 start-model algorithms bench test test-all lint

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv with Python >= 3.11 and install jaxrl with its tools

$(STAMP): pyproject.toml constraints.txt
	@if [ ! -x $(BIN)/python ]; then \
	  for candidate in $(PYTHONS); do \
	    if "$$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null </dev/null; then found=$$candidate; break; fi; \
	  done; \
	  if [ -z "$${found:-}" ]; then \
	    echo "jaxrl needs Python >= 3.11 with venv. Tried: $(PYTHONS). Install one, or name it: make setup PYTHONS=/path/to/python3.12" >&2; exit 1; \
	  fi; \
	  echo "Creating $(VENV) with $$("$$found" --version)"; \
	  "$$found" -m venv $(VENV); \
	fi
	@echo "Installing jaxrl[$(EXTRAS)] into $(VENV) (some minutes and about 1.5 GB the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

quickstart: setup ## Train the small shipped model on this CPU and draw its reward curve
	$(BIN)/python -m jaxrl.train --config configs/quickstart.toml --run.name quickstart-$$(date +%Y%m%d-%H%M%S)

smollm2: setup ## Fetch SmolLM2-135M-Instruct (93 MB) and convert it to models/ (542 MB)
	$(BIN)/python configs/smollm2/fetch_model.py

start-model: setup ## Make the quickstart's starting model anew
	$(BIN)/python configs/quickstart/make_start_model.py

algorithms: setup ## Train each algorithm of configs/algorithms on this CPU and draw its curves
	$(BIN)/python configs/algorithms/prepare.py
	$(BIN)/python benchmarks/algorithms.py

bench: setup ## Measure trainer, engine and packer; PEER_PYTHON=/path/to/python (torch, transformers) adds the peers
	PEER_PYTHON='$(PEER_PYTHON)' $(BIN)/python benchmarks/trainer.py
	PEER_PYTHON='$(PEER_PYTHON)' $(BIN)/python benchmarks/engine.py
	PEER_PYTHON='$(PEER_PYTHON)' $(BIN)/python benchmarks/packing.py

test: setup ## Run the tests that need no accelerator and no network
	$(BIN)/python -m pytest -q -m "not slow and not parity"

test-all: setup ## Run every test, the slow ones and (where torch is installed) the parity tests too
	$(BIN)/python -m pytest -q

lint: setup ## Check style, the layer rules and types
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/pyright --pythonpath $(BIN)/python
