# Two commands do everything from a bare clone: `make demo` and `make test`. Each builds .venv when it is missing.
PYTHON ?= python3
BIN := .venv/bin
# oneDNN's AMX kernels crash on machines that advertise AMX but do not grant it; one thread per test worker
TEST_ENV := ONEDNN_MAX_CPU_ISA=AVX512_CORE OMP_NUM_THREADS=1 MPLBACKEND=Agg
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest
# every annotation is checked at run time; this more than doubles the time of some files, so the core's tests alone have it
TYPES := --jaxtyping-packages=bayesattn,bayesattn_recipes,beartype.beartype
WORKERS ?= 2
# processes that share a GPU: most of the time of its tests is compilation on the host
GPU_WORKERS ?= 8
# a file stays with one worker, so that no worker trains a model again that another has for the same tests
SHARED := -n $(WORKERS) --dist loadfile
CORE := tests/unit tests/properties tests/statistical
# tests that need a process of their own kind, and in CI those that take long; `make test-all` leaves none of the latter out
APART := not compile and not kernel and not gpu
SLOW ?=
EXECUTED := $(patsubst docs/tutorials/%.py,build/tutorials/%.md,$(wildcard docs/tutorials/*.py))

.PHONY: help setup demo test test-all test-rest test-compile test-kernels test-docs tutorials docs test-gpu soak lint fmt package ci clean

help:            ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 18

setup: .venv/.installed  ## build the environment in .venv

.venv/.installed: pyproject.toml recipes/pyproject.toml constraints.txt
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]' -e './recipes[all]'
	touch $@

demo: setup      ## train soft and Bayesian attention side by side on embedded data
	$(BIN)/bayesattn demo

test: setup      ## unit, property and statistical tests
	$(PYTEST) $(TYPES) $(SHARED) -m '$(APART) $(SLOW)' $(CORE)

test-all: test test-rest test-compile test-kernels test-docs  ## everything that runs without a GPU

test-rest: setup  ## integrations, recipes, documentation
	$(PYTEST) $(SHARED) -m '$(APART) $(SLOW)' tests $(addprefix --ignore=,$(CORE) tests/kernels)

test-compile: setup  ## torch.compile, without run-time type checks (the two exclude each other)
	$(PYTEST) -n $(WORKERS) -m 'compile $(SLOW)' tests

test-kernels: setup  ## Triton kernels in the interpreter
	TRITON_INTERPRET=1 $(PYTEST) -n $(WORKERS) -m 'kernel and not gpu $(SLOW)' tests/kernels

test-docs: setup ## doctests
	$(PYTEST) --doctest-modules src/bayesattn recipes/bayesattn_recipes

.venv/.docs: .venv/.installed
	$(BIN)/pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

tutorials: .venv/.docs  ## execute the notebooks that changed, two at a time
	$(MAKE) --no-print-directory -j$(WORKERS) $(EXECUTED)

build/tutorials/%.md: docs/tutorials/%.py docs/site/execute.py
	$(TEST_ENV) $(BIN)/python docs/site/execute.py $< build/tutorials

docs: tutorials  ## the site in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	$(PYTEST) tests/site

test-gpu: setup  ## on a machine with a GPU
	$(PYTEST) -n $(GPU_WORKERS) -m gpu tests

soak: setup      ## kills, hostile files and a long run; DATA=DIR also kills recipes that read files
	$(TEST_ENV) $(BIN)/python benchmarks/soak/kills.py $(if $(DATA),--data $(DATA),--recipes digits,graph,vqa,captioning)
	$(TEST_ENV) $(BIN)/python benchmarks/soak/fuzz.py
	$(TEST_ENV) $(BIN)/python benchmarks/soak/leak.py

lint: setup      ## style, types, import direction
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

fmt: setup       ## format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

package: setup   ## build wheels and sdists, install them into an empty environment, try them
	$(TEST_ENV) $(BIN)/python tests/package/build_and_try.py

ci:              ## what .ci/run calls: everything but slow tests and a GPU
	$(MAKE) lint test-all package docs SLOW='and not slow'

clean:           ## remove what the tools leave behind
	rm -rf .pytest_cache .ruff_cache .hypothesis build dist
