# Two commands: `make train` and `make test`. Both build .venv on first use. LLMEXP_TEST_BF16=1 make test: as on a CPU with
# bf16 units, emulated.
PYTHON ?= python3
ARGS ?=

.venv/.ready: pyproject.toml constraints.txt
	@echo "Setting up .venv: torch and others, some minutes on first use"
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

.PHONY: train test test-all check size locked clean
train: .venv/.ready
	.venv/bin/llmexp train $(ARGS)

test: .venv/.ready check
	.venv/bin/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(ARGS)

test-all: .venv/.ready check
	.venv/bin/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder -m '' $(ARGS)

check: .venv/.ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# Lines and tokens of each room of the package.
size:
	@$(PYTHON) tests/size.py

# The environment from archives of known hashes, on the platform that requirements-ci.txt was made for.
locked:
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-ci.txt
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch .venv/.ready

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache
