# Development targets; PYTHON is the environment's interpreter.
PYTHON ?= python

.PHONY: check check-full lint types docs

check: types
	bash tests/run.sh

check-full: types
	bash tests/run.sh --full

lint:
	$(PYTHON) -m ruff check .

types:
	$(PYTHON) -m mypy

docs:
	$(PYTHON) -c 'import pathlib; from rlflow.report.metrics import installed_metrics, metrics_table; \
	p = pathlib.Path("docs/metrics.md"); \
	p.write_text(p.read_text().split("| metric |")[0] + metrics_table(installed_metrics()))'
