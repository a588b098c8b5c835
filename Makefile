# `make install` makes .venv with everything; all other targets build on it. Needs Python >= 3.11, pip and make.

PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$name"; break; }; done)
BIN := .venv/bin
STAMP := .venv/.installed
TORCH := $(shell sed -n 's/^ *"\(torch==[^"]*\)",$$/\1/p' pyproject.toml)

# Threads of two test processes that wait for work must not keep two cores busy with waiting.
WORKERS ?= 2
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Kernels that other processors would choose, and other numbers of threads; each is one run of EXACT.
KERNELS ?= ATEN_CPU_CAPABILITY=avx2 ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=AVX2 \
	OMP_NUM_THREADS=1 OMP_NUM_THREADS=4
EXACT := tests/end_to_end tests/running tests/methods tests/checking/test_verification.py \
	$(addprefix tests/profiling/,test_ops.py test_interpreter.py test_layouts.py test_whole_run.py)

.PHONY: install demo test quick test-kernels check format bench clean

install: $(STAMP)

# torch goes first and by its exact version, so that pip takes a local CPU wheel where there is one.
$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "lowtide needs Python 3.11 or newer: install it, or say make PYTHON=/path/to/python3" >&2; exit 1; }
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -e ".[all]"
	@touch $@

demo: install
	$(BIN)/lowtide run tiny-gpt2 --batch-size 16 --sequence-length 128 --budget 60% -o lowtide-out --force

test: install
	$(PYTEST)

# In less than a minute: whatever does not train, profile or look at a whole model.
quick: install
	$(PYTEST) -m "not long and not slow"

# All of them run, and it fails if one did.
test-kernels: install
	@failed=; for setting in $(KERNELS); do echo "== $$setting"; \
		env $$setting $(PYTEST) $(EXACT) || failed="$$failed $$setting"; done; \
	test -z "$$failed" || { echo "failed with:$$failed" >&2; exit 1; }

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST)

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Hours; it goes on where it was stopped. `make bench ONLY=bert-base` runs the pieces that begin so.
bench: install
	$(BIN)/python bench/results.py --only "$(ONLY)"
	$(BIN)/python bench/peaks.py -o bench/out/peaks.csv
	$(BIN)/python bench/profile_modes.py transformer:8 bert-base:4 resnet152:4 -o bench/out/modes.csv

clean:
	rm -rf .venv build dist lowtide-out .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find bench src tests -name __pycache__ -prune -exec rm -rf {} +
