# `make demo` and `make test` are all a newcomer needs; each sets up what it uses.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# On a machine without a GPU, a CPU build of torch saves gigabytes: see README, "Installing torch".
TORCH_INDEX_URL ?=
PIP_INSTALL := $(PIP) install -q -c constraints.txt $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL))
PRINT_DEPENDENCIES := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")
DEMO_ARGS := $(if $(ONCE),--once)
PYTEST_ARGS ?=
MINUTES ?= 30
BENCH_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install dev demo serve test test-slow kernels-report bench bench-peers soak lint format types check wheel clean

help: ## Show this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 14

$(VENV)/.installed: pyproject.toml constraints.txt $(wildcard engine/native/* lora_kernels/native/*)
	@$(PYTHON) scripts/preflight.py
	@echo "Setting up $(VENV), a few minutes the first time:"
	@test -x $(BIN)/python || { echo "  the virtual environment ..."; $(PYTHON) -m venv $(VENV); }
	@echo "  PyTorch and the other packages, gigabytes unless pip has a CPU build ..."
	@$(BIN)/python -c '$(PRINT_DEPENDENCIES)' | $(PIP_INSTALL) -r /dev/stdin
	@echo "  Loraplex and its CPU kernels, compiled where there is a C++ compiler ..."
	@$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Adding what development needs to $(VENV) ..."
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $@

install: $(VENV)/.installed ## Make the virtual environment with what serving needs

dev: $(VENV)/.installed-dev ## ... and with what development needs

demo: install ## Serve three adapters of two tenants on a real model (ONCE=1: answer and exit)
	@$(BIN)/loraplex demo $(DEMO_ARGS)

serve: install ## Serve your own model: make serve MODEL=DIR_OR_HUB_ID
	@test -n "$(MODEL)" || { echo "Say which model: make serve MODEL=DIR_OR_HUB_ID"; exit 2; }
	@$(BIN)/loraplex serve --model $(MODEL)

# A file's tests stay in one process: they share a service, or a model. `-n0` in PYTEST_ARGS undoes it.
test: dev ## Run the tests, in two processes
	@$(BIN)/python -m pytest -q -n2 --dist=loadfile $(PYTEST_ARGS)

test-slow: dev ## Run the tests that take minutes
	@$(BIN)/python -m pytest -q -m slow $(PYTEST_ARGS)

kernels-report: dev ## Compile the Triton kernels for three GPUs (none is needed) and print what they cost
	@$(BIN)/python scripts/kernels_report.py

bench: install ## Measure the service through HTTP beside what the machine allows (8 minutes)
	@$(BIN)/python -m benchmarks.serving.bench $(BENCH_ARGS)

bench-peers: install ## ... and beside vLLM, which is installed under .cache/ (45 minutes)
	@$(BIN)/python -m benchmarks.serving.bench_peers $(BENCH_ARGS)

soak: install ## Run everything at once on a real engine for MINUTES, and see that it is as it was
	@$(BIN)/python -m benchmarks.soak --minutes $(MINUTES) $(SOAK_ARGS)

lint: dev ## Check style and spelling
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/codespell

format: dev ## Rewrite the code in the house style
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

types: dev ## Check types
	@$(BIN)/pyright

check: lint types test ## Everything that must pass before a commit

wheel: dev ## Build the wheel
	@rm -rf build dist
	@$(BIN)/python -m build --wheel -q

clean: ## Remove the virtual environment and what builds leave behind
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
