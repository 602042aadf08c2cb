# From a bare Python 3.11 with pip: `make demo` and `make test` do all set-up.

# The first of these that is Python 3.11; `make PYTHON=...` overrides it.
ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell for python in python3.11 python3 python; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1 && echo "$$python" && break; done)
endif
ifeq ($(strip $(PYTHON)),)
PYTHON := python3.11
endif

PY := .venv/bin/python
PY_ENGINE := .venv-engine/bin/python
ARGS ?=

# Several ranks share this machine; one thread each keeps them from fighting for its cores.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-engine bench check docs venv venv-engine clean
# The two environments install the same folder and would write the same metadata at once.
.NOTPARALLEL:

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: venv ## from FSDP1 to FSDP2 on CPU, start to end
	$(PY) demo/run.py $(ARGS)

test: test-engine venv ## all tests but the slow ones, on both stacks; ARGS="-k name" selects on the official one
	$(PY) -m pytest -m "not slow" $(ARGS)

test-all: venv venv-engine ## the slow tests too
	$(PY_ENGINE) -m pytest tests/engine tests/benchmarks
	$(PY) -m pytest $(ARGS)

test-engine: venv-engine ## the engine's tests without Composer, on a newer torch
	$(PY_ENGINE) -m pytest -m "not slow" tests/engine tests/benchmarks

bench: venv ## what sharding, checkpoints and migrating cost, against torch by hand, Composer's FSDP2 and FSDP1
	-$(PY) benchmarks/step.py
	-$(PY) benchmarks/step.py --strategy SHARD_GRAD_OP
	-$(PY) benchmarks/step.py --against HEAD
	-$(PY) benchmarks/setup.py
	-$(PY) benchmarks/checkpoint.py
	-$(PY) benchmarks/migrate.py

check: venv ## lint, format, types, generated tables, and that every test can be collected
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) tools/generate_docs.py --check
	$(PY) -m pytest --collect-only -q

docs: venv ## write the generated tables again
	$(PY) tools/generate_docs.py

venv: ## .venv: Composer 0.32.1, LLM Foundry 0.22.0, torch 2.7.0
	@$(PYTHON) tools/make_venv.py official

venv-engine: ## .venv-engine: torch 2.13.0, no Composer
	@$(PYTHON) tools/make_venv.py engine

clean: ## remove the environments, builds and caches
	rm -rf .venv .venv-engine .venv.log .venv-engine.log build dist composer_fsdp2.egg-info
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
