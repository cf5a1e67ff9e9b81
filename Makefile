# Needs only make and Python 3.11 or newer. Every target makes the environment it needs in .venv, once.

PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
BIN    := .venv/bin
READY  := .venv/.ready
SEEDS  ?= 100
FIRST  ?= 1
JOBS   ?= 2
PYTEST := $(BIN)/pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder
LONGEST := tests/e2e tests/hostile tests/leaderboard/test_browser.py tests/leaderboard/test_screens.py \
           tests/leaderboard/test_leaderboard_whole_run.py tests/repo/test_site_in_a_browser.py \
           tests/benchmarks/test_benchmarks_gpu.py tests/simulation/test_played.py

.PHONY: help venv demo test e2e browser simulate mutants lint types docs site wheel smoke clean
.DEFAULT_GOAL := help

help: ## show this list
	@sed -nE 's/^([a-z0-9]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

venv: $(READY) ## make the environment in .venv

demo: $(READY) ## train a small swarm on this machine; ARGS="--help" lists what can be changed
	$(BIN)/dipaco-bootstrap demo --export demo/leaderboard $(ARGS)

test: $(READY) browser ## run the tests but the longest; ARGS="tests/core -k outer" picks some, JOBS=0 uses one process
	$(PYTEST) $(LONGEST:%=--ignore %) $(ARGS)

e2e: $(READY) browser ## run the longest tests: whole swarms of processes, attackers, browsers
	$(PYTEST) $(LONGEST) $(ARGS)

browser: ## see to a headless browser for the tests of the leaderboard; without one these are skipped
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
	  { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && echo "installing chromium: once" >&2 && \
	    apt-get -qq update && apt-get -qqy install --no-install-recommends chromium fonts-dejavu-core prometheus >/dev/null; } || \
	  echo "no Chromium here: the tests in a browser are skipped. Debian: apt-get install chromium" >&2

screens: $(READY) browser ## take the screens of the public page in docs/pictures/screens again
	DIPACO_PICTURES=docs/pictures/screens $(BIN)/pytest tests/leaderboard/test_screens.py

recording: $(READY) ## record a volunteer's terminal again: docs/pictures/volunteer.cast and .svg
	$(BIN)/python -m benchmarks.recording

simulate: $(READY) ## play SEEDS=500 simulated runs under faults from FIRST=1 on, and check every promise; again: continues
	$(BIN)/python -m simulation --first $(FIRST) --seeds $(SEEDS) --record build/simulation $(ARGS)

mutants: $(READY) ## plant errors into the programs, and see that the simulation finds each
	$(BIN)/python -m simulation --mutants --seeds $(SEEDS) $(ARGS)

lint: $(READY) ## check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## check types
	$(BIN)/mypy

docs: site ## the same as `make site`

site: $(READY) ## build the documentation into build/site, with what is made from the code; dead links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

wheel: $(READY) ## build the wheel and the sdist into dist
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist

smoke: wheel ## install the wheel into an environment made for it alone, and try everything that is in it
	$(BIN)/python tests/packaging/smoke.py --wheel dist/*.whl --constraints constraints.txt

clean: ## remove .venv, caches and build output
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment that is already there is kept, so that a torch installed by hand (constraints.txt says why) stays.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "error: Python 3.11 or newer is needed, \`$(PYTHON)\` is not; name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv: once, some minutes" >&2
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@
