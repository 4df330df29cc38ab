# Everything a contributor runs. `make` alone lists the targets.
# PYTHON=python3.12 chooses the interpreter of the environment; ARGS='...' is handed to what a target runs.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=
# Processes side by side, each with one thread of its own. Those that start ranks come after the others, one by one: on a
# busy machine ranks time out. Exit code 5 says that ARGS left nothing of one kind.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast lint format schemas bench check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(VENV)/.installed ## make .venv with mpx (editable), torch and the tools; again only when what it is made from changed

# pip, not another installer: it honours the machine's own pip settings, where a CPU build of torch may be configured.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0 --editable '.[dev]'
	@touch $@

demo: install ## train a small GPT on real text under mpx, about a minute on two cores, and read the report
	$(BIN)/mpx run --opt-level O1 scripts/train_gpt.py --steps 400 $(ARGS)

test: install ## run every test that this machine can run
	$(PYTEST) -m "not dist" $(ARGS) || [ $$? = 5 ]
	$(BIN)/python -m pytest -m dist $(ARGS) || [ $$? = 5 ]

test-fast: install ## run the tests that are not marked slow
	$(PYTEST) -m "not slow" $(ARGS)

lint: install ## check style, format and types; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install ## rewrite the files in the house format and apply the safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

schemas: install ## write the JSON schemas anew, of presets and of records
	$(BIN)/mpx presets schema > configs/mpx.schema.json
	$(BIN)/mpx report --schema > docs/run.schema.json

bench: install ## ratios of step time and memory against plain FP32 and torch.amp by hand, side by side
	$(BIN)/python scripts/bench.py $(ARGS)

check: lint test ## what a reviewer runs: lint, then every test

clean: ## remove the environment and every cache
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis dist build
