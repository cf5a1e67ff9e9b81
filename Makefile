# Needs only make and Python 3.11 or newer. Every target makes the environment it needs in .venv, once.

PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
BIN    := .venv/bin
READY  := .venv/.ready
SEEDS  ?= 100
JOBS   ?= 0

.PHONY: help venv demo test simulate mutants lint types docs clean
.DEFAULT_GOAL := help

help: ## show this list
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

venv: $(READY) ## make the environment in .venv

demo: $(READY) ## train a small swarm on this machine; ARGS="--help" lists what can be changed
	$(BIN)/dipaco-bootstrap demo $(ARGS)

test: $(READY) ## run the tests; ARGS="tests/core -k outer" picks some, JOBS=2 runs two at a time
	$(BIN)/pytest -n $(JOBS) --dist worksteal $(ARGS)

simulate: $(READY) ## play SEEDS=500 simulated runs under faults, and check every promise
	$(BIN)/python -m simulation --seeds $(SEEDS) $(ARGS)

mutants: $(READY) ## plant errors into the programs, and see that the simulation finds each
	$(BIN)/python -m simulation --mutants --seeds $(SEEDS) $(ARGS)

lint: $(READY) ## check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## check types
	$(BIN)/mypy

docs: $(READY) ## check that the generated parts of docs/ are up to date
	$(BIN)/python docs/build.py --check

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
