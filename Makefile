# vime: everything a person types. `make` lists it.
#
# `make demo` and `make test` set up a virtual environment of their own (.venv) the first time: about two minutes
# and 3 GB. Afterwards they start at once. Nothing outside .venv is touched.

SHELL := /bin/bash
VENV ?= .venv
BIN := $(VENV)/bin
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3,$(shell command -v $(p))))
# +cpu: PyPI alone would quietly give the CUDA build, which does not even import without its 3 GB of libraries.
TORCH := torch==2.13.0+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
DISTS := services/common clients/python services/buffer services/router services/rollout services/trainer
# --no-compile: bytecode of 3 GB takes a minute and a half; what is imported is compiled then.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

export HF_HUB_OFFLINE := 1

.PHONY: help setup protos demo test test-all test-peers unit integration e2e lint types contracts bench chaos clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

# ------------------------------------------------------------------ set-up
$(VENV)/.python:
	@test -n "$(PYTHON)" || { echo "vime needs Python 3.11 or 3.12 on PATH; found none"; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v in ((3, 11), (3, 12)) or sys.exit("vime needs Python 3.11 or 3.12; %s is %d.%d (choose with: make PYTHON=/path/to/python3.11)" % (sys.executable, *v))'
	@echo "[setup 1/4] virtual environment in $(VENV) from $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch: $(VENV)/.python
	@echo "[setup 2/4] torch, CPU build"
	@# By itself and first: looking everything up in the extra index costs seconds per package where it is unreachable.
	@$(PIP) --no-deps --retries 1 --extra-index-url $(TORCH_INDEX) $(TORCH) 2> >(grep -v -e 'is ignored' -e 'Retrying' >&2)
	@touch $@

$(VENV)/.deps: $(VENV)/.torch requirements/cpu.txt requirements/dev.txt
	@echo "[setup 3/4] vLLM (CPU build), megatron-core and the rest of requirements/*.txt (about 1.3 GB)"
	@$(PIP) --no-deps -r requirements/cpu.txt -r requirements/dev.txt 2> >(grep -v 'is ignored' >&2)
	@touch $@

$(VENV)/.protos: $(VENV)/.deps protos/pyproject.toml protos/hatch_build.py $(shell find protos/vime -name '*.proto')
	@echo "[setup 4/4] contracts and the seven distributions, editable"
	@$(PIP) --no-deps -e protos 2> >(grep -v 'is ignored' >&2)
	@touch $@

$(VENV)/.dists: $(VENV)/.protos $(foreach d,$(DISTS),$(d)/pyproject.toml)
	@$(PIP) --no-deps --no-build-isolation $(foreach d,$(DISTS),-e $(d)) 2> >(grep -v 'is ignored' >&2)
	@touch $@

setup: $(VENV)/.dists ## make or refresh the virtual environment
protos: $(VENV)/.protos ## regenerate the Python stubs after editing a .proto

# ------------------------------------------------------------------ use
RECIPE ?= recipes/addition/grpo.toml
demo: setup ## train a tiny mixture-of-experts model at addition, through all four services (about 4 minutes)
	@$(BIN)/vime run $(RECIPE) --fresh

# ------------------------------------------------------------------ check
SELECT := not slow
test: setup lint types contracts unit integration e2e ## everything CI checks
test-all: SELECT := slow or not slow
test-all: test ## the same and what CI has no time for

lint: setup
	@echo "== ruff, import-linter"
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet .
	@$(BIN)/lint-imports --no-logo

types: setup
	@echo "== mypy --strict"
	@$(BIN)/mypy

contracts: setup
	@echo "== buf lint, format, breaking"
	@$(BIN)/buf lint && $(BIN)/buf format --diff --exit-code --path protos/vime
	@$(BIN)/python tests/contract/breaking.py

unit: setup
	@echo "== unit tests of the seven distributions, and contracts old against new"
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "$(SELECT)" services clients tests/contract

integration: setup
	@echo "== integration: what crosses services"
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "$(SELECT)" tests/integration tests/faults

e2e: setup
	@echo "== end to end: a short real run"
	@$(BIN)/python -m pytest -q -m "$(SELECT)" tests/e2e

PEERS := .peers
test-peers: setup ## losses and advantages side by side with TRL, from a folder of its own (.peers)
	@test -d $(PEERS)/trl || $(PIP) --no-deps --target $(PEERS) -r requirements/peers.txt 2> >(grep -v 'is ignored' >&2)
	@PYTHONPATH=$(PEERS) $(BIN)/python -m pytest -q tests/peers

NAME ?=
ROUNDS ?= 20
bench: setup ## make bench NAME=algorithms|… ; without NAME lists them
	@$(BIN)/python -m tests.bench $(NAME)

chaos: setup ## make chaos NAME=run|buffer|router ROUNDS=n ; without NAME lists them
	@$(BIN)/python -m tests.chaos $(NAME) --rounds $(ROUNDS)

clean: ## remove the virtual environment and caches (runs/ stays)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
