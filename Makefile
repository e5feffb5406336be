# `make demo` runs the main job, `make test` every check of every day. Both set everything up.
#
# Tests:
#   make test                     style, types and the short tests, in some nine minutes on two cores
#   make long                     the long variations that `make test` leaves out, part after part,
#                                 each within ten minutes; prints how long each part took
#   make long PART=2/3            one of these parts alone
#   python3 -m pytest tests/gpu   on a machine with an NVIDIA GPU, in some four minutes: what only a
#                                 GPU can show. Needs pytest, torch and numpy, and no installation
#   .venv/bin/python -m pytest tests/test_stage.py -k memory    while you work
# Whoever changes what trains runs all three before a release and says how long each took.
PYTHON ?= python3
BIN := .venv/bin
PARTS := 1/3 2/3 3/3
PART ?= $(PARTS)

.PHONY: demo test long setup clean

setup: .venv/ready

.venv/ready: requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

demo: setup
	OMP_NUM_THREADS=1 $(BIN)/python examples/digits.py
	$(BIN)/python examples/demo.py

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist worksteal

long: setup
	@for part in $(PART); do \
		echo "part $$part of the long tests"; \
		before=$$(date +%s); \
		$(BIN)/python -m pytest -n 2 --dist worksteal -m long --part $$part --durations 5 || exit; \
		echo "part $$part took $$(($$(date +%s) - before)) s"; \
	done

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache demo-output
