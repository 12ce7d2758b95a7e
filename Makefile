# Two commands do everything on a fresh clone: `make quickstart` and `make test`.
#
#   PYTHON  the interpreter to build the environment with (3.11 or newer)
#   TORCH   the build of torch: the default is the registry's own; a CUDA or CPU build by its index, for example
#           make test TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130'
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Tests start worker processes of their own: a few at a time, however many cores there are.
SPREAD := --numprocesses=auto --maxprocesses=4 --dist=worksteal

# Tests and benchmarks start many processes, none of which should compile the sources again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-hosts fuzz coverage check marks format docs bench clean

help:
	@echo "make quickstart   train a small model by SFT and GRPO on this machine (a few minutes)"
	@echo "make test         the tests"
	@echo "make test-hosts   the tests of several hosts: network namespaces, a real Slurm, a real Ray (Linux, as root)"
	@echo "make fuzz         the tests, with random cases that are new each time"
	@echo "make coverage     the tests, with what they cover (half as long again)"
	@echo "make check        format, lint, types and words"
	@echo "make marks        the marks of the structure: sizes, packages, imports, names"
	@echo "make bench        the benchmarks, side by side with their peers (long)"

# torch first and by itself: any other requirement on torch is then met, and no second build is fetched.
$(VENV)/run: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) --constraint constraints.txt --editable '.[run]'
	$(BIN)/python -c 'from realgraph.screen.first_search import prepare_search; prepare_search()'
	touch $@

$(VENV)/ready: $(VENV)/run
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	touch $@

quickstart: $(VENV)/run
	$(BIN)/realgraph quickstart

# What real clusters are tested on: Debian's Slurm, unpacked into the environment, and Ray. Not there: those tests are
# skipped.
$(VENV)/hosts: $(VENV)/ready
	$(PIP) --constraint constraints.txt --editable '.[ray]' || echo "no Ray could be installed: its tests are skipped"
	$(BIN)/python -m tests.slurm_cluster || echo "no Slurm could be fetched: its tests are skipped"
	touch $@

test: $(VENV)/ready
	$(PYTEST) -q --durations=10 $(SPREAD) --ignore=tests/hosts

test-hosts: $(VENV)/hosts
	$(PYTEST) -q -rs --durations=10 --numprocesses=2 --dist=worksteal tests/hosts

fuzz: $(VENV)/ready
	$(PYTEST) -q --hypothesis-profile=default $(SPREAD)

coverage: $(VENV)/ready
	$(PYTEST) -q $(SPREAD) --cov --cov-report=term:skip-covered

check: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python tests/check_words.py

marks:
	$(PYTHON) tests/marks.py

format: $(VENV)/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/run
	$(BIN)/realgraph schema --out-dir docs

bench: $(VENV)/ready
	$(PIP) --constraint constraints.txt --editable '.[bench]'
	for name in scheduler hosts data_plane collectives reallocation generation generation_layouts parallel_engines context_parallel \
		microbatching equivalence rehearsals vs_trl vs_accelerate quickstart planner planner_bounds planner_large \
		predictions concurrency bad_inputs chaos chaos_hosts crash_points; do \
		OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.$$name || exit 1; done

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
