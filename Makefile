# `make help` lists the targets. Overrides of the command line go into ARGS; JOBS processes share the
# cells of an experiment:
#   make table2 PROFILE=paper ARGS="device_map=auto" JOBS=1

PROFILE ?= tiny
ARGS    ?=
JOBS    ?= $(if $(filter paper,$(PROFILE)),1,2)
PYTHON  ?= python3
VENV    ?= .venv
BIN      = $(VENV)/bin
PY       = $(BIN)/python

.DEFAULT_GOAL := help
.PHONY: help install table1 table2 smoke test check clean

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

install: $(VENV)/.installed  ## create .venv from the pinned constraints

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

table1: install  ## run what Table 1 lacks, then render it (PROFILE=tiny|zoo|paper)
	$(call run-and-render,table1)

table2: install  ## run what Table 2 lacks, then render it (PROFILE=tiny|zoo|paper)
	$(call run-and-render,table2)

# Computes an experiment in JOBS processes; the highest status is kept.
run = status=0; pids=; \
	for i in $$(seq $(JOBS)); do \
	  $(PY) -m capmoe_eval experiment=$(1) profile=$(PROFILE) shard=$$i/$(JOBS) $(ARGS) & pids="$$pids $$!"; \
	done; \
	for pid in $$pids; do s=0; wait $$pid || s=$$?; [ $$s -le $$status ] || status=$$s; done

# A failed cell leaves a hole in the table, not no table; the status still tells.
define run-and-render
	@$(call run,$(1)); \
	if [ $$status -le 1 ]; then $(PY) -m capmoe_eval.tables $(1) profile=$(PROFILE) $(ARGS) || status=$$?; fi; \
	exit $$status
endef

smoke: install  ## every method on every embedded family, a few documents each
	$(PY) -m capmoe_eval experiment=smoke results_dir=$$(mktemp -d)/smoke

test: install  ## the tests, with coverage
	$(PY) -m pytest --cov --cov-report=term:skip-covered

check: install  ## linters, types, import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:  ## remove the environment and what tools left behind; results stay
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
