# Everything a developer or CI does. `make demo` and `make test` work on a fresh machine; each installs what it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup demo test test-slow soak check bench planner-table clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[torch,models,report,dev,bench]"
	touch $@

# Two CPU ranks, a small GPT on the source of Python's standard library; shows the layout, the speed and the memory.
demo: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --picture out/layout.html

test: $(STAMP)
	$(BIN)/pytest

test-slow: $(STAMP)
	$(BIN)/pytest -m slow --timeout 1800

# Half an hour of random segments, saves, kills and resumes against a run that nothing happened to. SOAK="--minutes 5"
soak: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/soak.py $(SOAK)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python benchmarks/bench_step.py --write docs/benchmarks.md

planner-table: $(STAMP)
	$(BIN)/python benchmarks/planner_table.py --write docs/planner.md

clean:
	rm -rf $(VENV) build dist out .pytest_cache .ruff_cache .hypothesis
