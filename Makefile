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
# A change that breaks the tests by the dozen is red soon.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --maxfail=20
# Tests start worker processes of their own: a few at a time, however many cores there are.
SPREAD := --numprocesses=auto --maxprocesses=4 --dist=worksteal

# The planner's search as machine code, kept beside its sources: a second of processor time where it is there already.
COMPILE = $(BIN)/python -c 'from realgraph.screen.first_search import prepare_search; prepare_search()'

# Tests and benchmarks start many processes, none of which should compile the sources again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help quickstart compiled test test-slow test-hosts test-sglang fuzz coverage check marks format docs bench clean

help:
	@echo "make quickstart   train a small model by SFT and GRPO on this machine (a few minutes)"
	@echo "make test         the tests, but for the slow ones"
	@echo "make test-slow    the slow ones: runs that are broken and resumed, searches held against brute force"
	@echo "make test-hosts   the tests of several hosts: network namespaces, a real Slurm, a real Ray (Linux, as root)"
	@echo "make test-sglang  the tests of a real SGLang server, in an environment of its own (1.6 GB, Linux)"
	@echo "make fuzz         all of these, with random cases that are new each time"
	@echo "make coverage     all of these, with what they cover (half as long again)"
	@echo "make check        format, lint, types and words"
	@echo "make marks        the marks of the structure: sizes, packages, imports, names"
	@echo "make bench        the benchmarks, side by side with their peers (long)"

# torch first and by itself: any other requirement on torch is then met, and no second build is fetched.
$(VENV)/run: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) --constraint constraints.txt --editable '.[run]'
	$(COMPILE)
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

# Once, after a change of the search: else every process of the tests, and each one's fork server, compiles it for
# itself at the same time.
compiled: $(VENV)/ready
	@$(COMPILE)

test: compiled
	$(PYTEST) -q --durations=10 $(SPREAD) -m "not slow" --ignore=tests/hosts --ignore=tests/sglang

test-slow: compiled
	$(PYTEST) -q --durations=10 $(SPREAD) -m slow --ignore=tests/hosts --ignore=tests/sglang

test-hosts: $(VENV)/hosts
	$(PYTEST) -q -rs --durations=10 --numprocesses=2 --dist=worksteal tests/hosts

# SGLang asks for other versions than ours of nearly everything, so it has an environment of its own. It starts anew
# when the pins change. What they ask for themselves is left out: CUDA's packages, and another torch. `ready` has the
# seconds that it took, which the tests tell at their end beside their own.
$(VENV)/sglang/ready: tests/sglang/requirements.txt
	rm -rf $(VENV)/sglang
	mkdir -p $(VENV)/sglang && date +%s > $(VENV)/sglang/began
	$(PYTHON) -m venv $(VENV)/sglang
	$(VENV)/sglang/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(VENV)/sglang/bin/python -m pip install --quiet --disable-pip-version-check \
		--no-deps --require-hashes --requirement tests/sglang/requirements.txt
	echo $$(( $$(date +%s) - $$(cat $(VENV)/sglang/began) )) > $@

test-sglang: $(VENV)/ready
	@if $(MAKE) $(VENV)/sglang/ready; then \
		$(PYTEST) -q -rs --durations=10 --numprocesses=2 --dist=loadfile tests/sglang; \
	elif [ "$(SGLANG_OPTIONAL)" = 1 ]; then \
		echo "SKIPPED, FOR SGLANG_OPTIONAL=1: SGLang can't be installed, and nothing was tested against a real server"; \
	else \
		echo "SGLang can't be installed, see above. SGLANG_OPTIONAL=1 leaves its tests out."; exit 1; \
	fi

fuzz: compiled
	$(PYTEST) -q --hypothesis-profile=random $(SPREAD) --ignore=tests/sglang

coverage: compiled
	$(PYTEST) -q $(SPREAD) --ignore=tests/sglang --cov --cov-report=term:skip-covered

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
	for name in scheduler hosts data_plane collectives reallocation generation generation_layouts parallel_engines \
		context_parallel microbatching equivalence rehearsals vs_trl vs_accelerate quickstart planner planner_bounds planner_large \
		predictions concurrency staleness_control staleness_runs async_vs_sync bad_inputs chaos chaos_async chaos_hosts \
		crash_points; do \
		OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.$$name || exit 1; done

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
