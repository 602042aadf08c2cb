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
PY_NEWEST := .venv-newest/bin/python
ARGS ?=
# Two lanes, see tests/support/lanes.py; ARGS="-n 0" is one process, for a debugger.
PYTEST := -m pytest -n 2
# What the newer torch is for: rooms that import no Composer, and whose tests say something of torch.
ENGINE_TESTS := tests/_torch tests/sharding tests/fsdp tests/training tests/parallel tests/estimate tests/checkpoint \
	tests/fsdp1/test_state_dicts.py tests/test_prepare.py

# Several ranks share this machine; one thread each keeps them from fighting for its cores.
export OMP_NUM_THREADS ?= 1
# Without compiled files each new process would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-others test-newest test-all test-all-engine test-all-official test-all-checkpoints test-all-parity test-engine coverage bench gpu release check docs site venv venv-engine venv-newest venv-site clean
# The two environments install the same folder and would write the same metadata at once.
.NOTPARALLEL:

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-21s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: venv ## from FSDP1 to FSDP2 on CPU, start to end
	$(PY) demo/run.py $(ARGS)

test: test-engine venv ## all tests but the slow ones, on both stacks; ARGS="-k name" selects on the official one
	$(PY) $(PYTEST) -m "not slow and not others" $(ARGS)

test-others: venv ## how torch, Composer and others behave by themselves, and read migrated files: for a change of a pinned version
	$(PY) tests/support/other_releases.py
	$(PY) $(PYTEST) -m others $(ARGS)

test-engine: venv-engine ## the engine's tests without Composer, on a newer torch
	$(PY_ENGINE) $(PYTEST) -m "not slow and not any_torch and not others" $(ENGINE_TESTS)

test-newest: venv-newest ## the engine's tests on the newest torch that pip finds
	$(PY_NEWEST) -c 'import sys, torch; print("torch", torch.__version__, "on Python", sys.version.split()[0])'
	$(PY_NEWEST) $(PYTEST) -m "not slow and not any_torch and not others" $(ENGINE_TESTS)

test-all: test-all-engine test-all-official test-all-checkpoints test-all-parity ## the slow tests too, in four parts

test-all-engine: venv-engine ## ... of the engine, on the newer torch
	THOROUGH=1 $(PY_ENGINE) $(PYTEST) $(ENGINE_TESTS)

test-all-official: venv ## ... of the rest, without the two below
	THOROUGH=1 $(PY) $(PYTEST) --ignore=tests/parity --ignore=tests/compat/test_load_fsdp1.py $(ARGS)

test-all-checkpoints: venv ## ... of FSDP1's checkpoints
	THOROUGH=1 $(PY) $(PYTEST) tests/compat/test_load_fsdp1.py $(ARGS)

test-all-parity: venv ## ... of parity with FSDP1
	THOROUGH=1 $(PY) $(PYTEST) tests/parity tests/fsdp/test_parity.py $(ARGS)

coverage: venv venv-engine ## branch coverage of `make test`; .coverage says which test file runs which line
	$(PY) -m coverage erase
	-$(PY_ENGINE) -m coverage run $(PYTEST) -m "not slow and not any_torch and not others" $(ENGINE_TESTS)
	-$(PY) -m coverage run $(PYTEST) -m "not slow and not others" $(ARGS)
	-$(PY) -m coverage combine --quiet --append # a process that was killed may leave half a file
	$(PY) -m coverage report --ignore-errors --skip-covered --sort=cover

bench: venv ## what sharding, checkpoints, migrating and starting cost, against torch by hand, Composer's FSDP2 and FSDP1
	-$(PY) benchmarks/step.py
	-$(PY) benchmarks/step.py --strategy SHARD_GRAD_OP
	-$(PY) benchmarks/step.py --trainer
	-$(PY) benchmarks/dispatch.py
	-$(PY) benchmarks/setup.py
	-$(PY) benchmarks/checkpoint.py
	-$(PY) benchmarks/saving.py
	-$(PY) benchmarks/migrate.py
	-$(PY) benchmarks/start.py

gpu: venv venv-engine ## all GPU tests and benchmarks on the GPUs that there are, and their tables in benchmarks/README.md
	$(PY) tools/gpu.py $(ARGS)

release: venv ## wheel and source distribution into dist/, checked, and the wheel run in empty environments with three releases of torch
	$(PY) $(PYTEST) tests/test_distributions.py
	$(PY) -m pip install --quiet --no-input --disable-pip-version-check --editable ".[release]"
	$(PY) tools/release.py

check: venv ## lint, format, types, generated tables, and that every test can be collected
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) tools/generate_docs.py --check
	$(PY) -m pytest --collect-only -q
	@echo "checked; after a change of a pinned version (pyproject.toml) run make test-others too"

docs: venv ## write the generated tables again
	$(PY) tools/generate_docs.py

site: venv-site ## the pages with a search in build/site; a dead link or anchor fails
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/python -m mkdocs build --strict --clean
	@echo "open build/site/index.html, or for the search: python3 -m http.server -d build/site"

venv: ## .venv: Composer 0.32.1, LLM Foundry 0.22.0, torch 2.7.0
	@$(PYTHON) tools/make_venv.py official

venv-engine: ## .venv-engine: torch 2.13.0, no Composer
	@$(PYTHON) tools/make_venv.py engine

venv-newest: ## .venv-newest: the newest torch that pip finds, no Composer
	@$(PYTHON) tools/make_venv.py newest

venv-site: ## .venv-site: mkdocs-material alone
	@$(PYTHON) tools/make_venv.py site

clean: ## remove the environments, builds and caches
	rm -rf .venv .venv-engine .venv-newest .venv-site .venv*.log .others build dist composer_fsdp2.egg-info
	rm -rf .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
