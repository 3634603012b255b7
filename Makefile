# Two commands: `make train` and `make test`. Both build .venv on first use. LLMEXP_TEST_BF16=1 make test: as on a CPU with
# bf16 units, emulated.
PYTHON ?= python3
ARGS ?=

.venv/.ready: pyproject.toml constraints.txt
	@echo "Setting up .venv: torch and others, some minutes on first use"
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

.PHONY: train test quick test-all test-processors words same mutants mutants-mended check docs size core locked clean
train: .venv/.ready
	.venv/bin/llmexp train $(ARGS)

test: .venv/.ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/python -m pytest -n 4 $(ARGS)

# The tests nearest to what differs from main (ARGS: from another commit), in a minute.
quick: .venv/.ready
	@.venv/bin/python -m tools.quick $(ARGS)

test-all: .venv/.ready check
	.venv/bin/python -m pytest -n 4 -m '' $(ARGS)

# The tests that bear numbers, as on other processors (LLMEXP_TEST_THREADS: threads of each process). Their kernels add in
# other orders; a name that this CPU or this numpy does not know has no effect. Left out is what prints, draws and compiles.
NUMBERS = tests/golden tests/models tests/test_optim.py \
	$(addprefix tests/features/,clip_table noise outliers) \
	$(addprefix tests/compare/test_,comparing.py curves.py inference.py null_pairs.py statistics.py target.py) \
	-k 'not compile and not graph and not process and not thread'
OLD = ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 \
	NPY_DISABLE_CPU_FEATURES="X86_V3 X86_V4 AVX512_ICL AVX512_SPR AVX2 FMA3"
AVX2 = ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
test-processors: .venv/.ready
	$(OLD) .venv/bin/python -W ignore -m pytest -n 3 $(NUMBERS) $(ARGS)
	$(AVX2) LLMEXP_TEST_THREADS=4 OMP_WAIT_POLICY=passive .venv/bin/python -m pytest -n 1 $(NUMBERS) $(ARGS)

# The texts that llmexp prints, written anew into tests/golden/words: read the diff.
words: .venv/.ready
	LLMEXP_WORDS=write .venv/bin/python -m pytest -m '' $(ARGS)

# Two checkouts on this machine, bit by bit: make same BASE=main
same: .venv/.ready
	.venv/bin/python -m tests.golden.same $(BASE) $(ARGS)

# Small faults, planted one at a time: which test finds each, and which live. Hours; ARGS='--group run --sample 5' tries some,
# --limit-s 40 leaves open what takes longer.
mutants: .venv/.ready
	.venv/bin/python -m tools.mutants run $(ARGS)

# After code has moved: find the mutants again, and draw others for those that are gone.
mutants-mended: .venv/bin/cosmic-ray
	.venv/bin/python -m tools.mutants mend

.venv/bin/cosmic-ray: .venv/.ready
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mutants]'
	touch $@

check: .venv/.ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

# README.md, docs/ and the pages of tools/reference.py as a site in build/site; a link that leads nowhere is an error.
# `.venv/bin/mkdocs serve` shows changes.
.venv/bin/mkdocs: .venv/.ready
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

docs: .venv/bin/mkdocs
	mkdir -p build/pages
	ln -sfn $(CURDIR)/*.md $(CURDIR)/docs $(CURDIR)/benchmarks build/pages/
	.venv/bin/python -m tools.reference build/pages/reference
	.venv/bin/mkdocs build --strict

# Lines and tokens of each package.
size:
	@$(PYTHON) -m tools.size

# The functions that plain runs call, with lines and tokens: what to read first. Some minutes.
core: .venv/.ready
	.venv/bin/python -m tools.core $(ARGS)

# The environment from archives of known hashes, on the platform that requirements-ci.txt was made for.
locked:
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-ci.txt
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch .venv/.ready

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache
