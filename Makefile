# `make demo` and `make test` need Python 3.10+ and make; they set everything up in .venv on first use.
#
# PYTHON and SWIFT choose another interpreter and another ms-swift (newest, oldest, or a version), on the command line
# or in the environment, where CI's matrix sets them. Each pair has an environment of its own, so that none is of an
# earlier choice: `make test PYTHON=python3.12 SWIFT=oldest` works in .venv-python3.12-oldest.
PYTHON ?= python3
SWIFT ?= newest
VENV := .venv$(addprefix -,$(filter-out python3,$(notdir $(PYTHON))))$(addprefix -,$(filter-out newest,$(SWIFT)))
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The oldest is the lower end of the range in pyproject.toml; the newest is what an installer takes of that range.
OLDEST := $(shell sed -n 's/.*"ms-swift>=\([0-9.]*\),.*/\1/p' pyproject.toml)
# The extras of pyproject.toml that an environment has.
EXTRAS := test,docs
REQUIRED := -e '.[$(EXTRAS)]' $(addprefix ms-swift==,$(patsubst oldest,$(OLDEST),$(filter-out newest,$(SWIFT))))

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-telling test-engines run-engines test-oldest test-oldest-few test-transformers run-transformers test-torch run-torch lint format bench bench-start bench-loader bench-branches bench-ways same-steps scale soak-long families docs docs-tables clean

help:  ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

# uv resolves ms-swift with torch in seconds, plain pip in minutes; torch and torchvision come from one resolution,
# so they are of the same build. Touching pyproject.toml installs again into the same folder. Bytecode is compiled here,
# once: where Python may not write it (PYTHONDONTWRITEBYTECODE) every process takes 10 s longer to import ms-swift.
$(READY): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  echo "cannot create $(VENV): $(PYTHON) needs its venv module (Debian: apt-get install python3-venv)"; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv 2>/dev/null || echo "uv cannot be had; using pip"
	@if $(BIN)/python -m uv --version >/dev/null 2>&1; then \
	  $(BIN)/python -m uv pip install --compile-bytecode --python $(BIN)/python $(REQUIRED); \
	else \
	  $(BIN)/python -m pip install --disable-pip-version-check $(REQUIRED); \
	fi
	@touch $@

demo: $(READY)  ## Train a tiny model padded and packed, and compare
	$(BIN)/python -m benchmarks.demo

# Files or folders of tests; empty is all of them.
TESTS ?=

test: $(READY)  ## Run the test suite (a few minutes), or TESTS of it
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not engines" $(TESTS)

test-slow: $(READY)  ## Run the long tests
	$(BIN)/python -m pytest -m slow

test-telling: $(READY)  ## Run those of the long tests that CI runs too
	$(BIN)/python -m pytest -n 2 -m "slow and telling"

# In an environment of its own, because transformers imports DeepSpeed wherever it is installed.
test-engines:  ## Train by DeepSpeed and FSDP2 on two ranks, and pack by Megatron (15 minutes)
	$(MAKE) run-engines VENV=$(VENV)-engines EXTRAS=test,test-engines

run-engines: $(READY)
	$(BIN)/python -m pytest -m engines tests/engines

test-oldest:  ## Run the tests of the host layer against the oldest supported ms-swift (20 minutes)
	$(MAKE) test SWIFT=oldest TESTS="tests/host tests/e2e"

# Every seam is looked at (test_install), every way to load rows, and losses, padding, parts and plans are trained once.
test-oldest-few:  ## Run the tenth of test-oldest that CI runs
	$(MAKE) test SWIFT=oldest TESTS="tests/host/test_install.py tests/host/rows/test_same_rows.py tests/host/test_loss.py \
	  tests/host/test_padding.py tests/host/test_pretrain.py tests/host/test_evaluation.py tests/host/parts \
	  tests/host/test_together.py tests/e2e/test_plan.py"

# Beyond the range of pyproject.toml, to learn early what a new transformers breaks; pip warns of it and installs it.
test-transformers:  ## Run tests/attention on the newest transformers, which may fail
	$(MAKE) run-transformers VENV=$(VENV)-transformers EXTRAS=test

# The first whose varlen_attn takes windows, a scale and grouped heads.
OLDEST_TORCH := 2.12.0

test-torch:  ## Rehearse CUDA on the oldest torch that has its kernel
	$(MAKE) run-torch VENV=$(VENV)-torch EXTRAS=test

run-torch: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==$(OLDEST_TORCH) torchvision
	$(BIN)/python -m pytest tests/attention/test_rehearsal.py

run-transformers: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade transformers
	$(BIN)/python -m pytest tests/attention

lint: $(READY)  ## ruff check, ruff format --check, mypy strict (all but host)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)  ## Let ruff format and mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# More of the command line of a benchmark.
ARGUMENTS ?=

bench: $(READY)  ## Measure the strategies; prints the tables of benchmarks/RESULTS.md
	$(BIN)/python benchmarks/strategies.py

bench-start: $(READY)  ## Measure the first step, beside plain ms-swift; ARGUMENTS="--runs 5" as published
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.first_step $(ARGUMENTS)

bench-loader: $(READY)  ## Measure what dataloaders deliver, beside plain ms-swift and encoding alone (three minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.loader $(ARGUMENTS)

bench-branches: $(READY)  ## Measure rows that share an image, beside the same rows packed without (half an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.branches $(ARGUMENTS)

bench-ways: $(READY)  ## Train the same samples padded, padding_free, in the same steps, in packs; in turns
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.ways $(ARGUMENTS)

same-steps: $(READY)  ## Train steps that keep their samples beside plain swift sft, 50 steps each (15 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.beside_plain $(ARGUMENTS)

scale: $(READY)  ## Measure planning and voting for many ranks; prints the tables of docs/scale.md
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.scale

soak-long: $(READY)  ## Watch memory, descriptors and step time of runs of 10,000 steps (15 minutes)
	$(BIN)/python -m benchmarks.long_run $(ARGUMENTS)

# Quoted twice, as names have spaces: make families NAMES='"Gemma 3" "GLM-OCR"'. Empty is all of them.
NAMES ?=

families: $(READY)  ## Try every family of models, or NAMES of them; writes docs/families.md
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.host.model.family_table $(NAMES)

# Warnings are errors: a link to nowhere, a page that no menu has, a docstring that cannot be read.
docs: $(READY)  ## Build the documentation site into build/site
	$(BIN)/python -m sphinx -q -W --keep-going -c docs -d build/trees . build/site
	@echo "open build/site/index.html"

docs-tables: $(READY)  ## Write the tables of docs/ that follow from code, and the tutorial as a notebook
	$(BIN)/python -m tests.doc_tables
	$(BIN)/python -m tests.tutorial_notebook

clean:  ## Remove what the targets made
	rm -rf .venv .venv-* build demo_output .pytest_cache .ruff_cache .mypy_cache *.egg-info
