# Two commands: `make demo` runs the main job, `make test` every check. Both set everything up.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test setup clean

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
	$(BIN)/python -m pytest -n 2

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache demo-output
