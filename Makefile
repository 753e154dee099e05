# Development targets; PYTHON is the environment's interpreter.
PYTHON ?= python

.PHONY: check check-full lint format types docs house

check: types
	bash tests/run.sh

check-full: types
	bash tests/run.sh --full
	bash tests/run.sh --matrix

lint:
	$(PYTHON) -m ruff check .

format:
	$(PYTHON) -m ruff format .

types:
	$(PYTHON) -m mypy

docs:
	$(PYTHON) docs/metrics_table.py
	$(PYTHON) docs/api_page.py

house:
	$(PYTHON) -m tests.house
