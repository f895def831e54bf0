# Two commands do everything from a bare clone: `make demo` and `make test`. Each builds .venv when it is missing.
PYTHON ?= python3
BIN := .venv/bin
# oneDNN's AMX kernels crash on machines that advertise AMX but do not grant it; one thread per test worker
TEST_ENV := ONEDNN_MAX_CPU_ISA=AVX512_CORE OMP_NUM_THREADS=1 MPLBACKEND=Agg
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest
TYPES := --jaxtyping-packages=bayesattn,bayesattn_recipes,beartype.beartype
WORKERS ?= 2

.PHONY: help setup demo test test-all test-compile test-kernels test-docs test-gpu soak lint fmt ci clean

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
	$(PYTEST) $(TYPES) -n $(WORKERS) -m 'not compile and not kernel and not gpu' tests/unit tests/properties tests/statistical

test-all: setup  ## everything that runs without a GPU
	$(PYTEST) $(TYPES) -n $(WORKERS) -m 'not compile and not kernel and not gpu' tests
	$(MAKE) test-compile test-kernels test-docs

test-compile: setup  ## torch.compile, without run-time type checks (the two exclude each other)
	$(PYTEST) -n $(WORKERS) -m compile tests

test-kernels: setup  ## Triton kernels in the interpreter
	TRITON_INTERPRET=1 $(PYTEST) -n $(WORKERS) -m 'kernel and not gpu' tests/kernels

test-docs: setup ## doctests
	$(PYTEST) --doctest-modules src/bayesattn recipes/bayesattn_recipes

test-gpu: setup  ## on a machine with a GPU
	$(PYTEST) -m gpu tests

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

ci: lint test-all  ## what .ci/run calls

clean:           ## remove what the tools leave behind
	rm -rf .pytest_cache .ruff_cache .hypothesis build dist
