# `make install` makes .venv with everything; all other targets build on it. Needs Python >= 3.11, pip and make.

PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$name"; break; }; done)
BIN := .venv/bin
STAMP := .venv/.installed
# What tests and demo run with by default; any version that pyproject.toml allows will do.
TORCH ?= torch==2.13.0

# Threads of two test processes that wait for work must not keep two cores busy with waiting; and none of the
# many processes that tests start compiles lowtide again.
WORKERS ?= 2
QUIETLY := OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE=
PYTEST := $(QUIETLY) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Kernels that other processors would choose, and other numbers of threads; each is one run of EXACT.
KERNELS ?= ATEN_CPU_CAPABILITY=avx2 ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=AVX2 \
	OMP_NUM_THREADS=1 OMP_NUM_THREADS=4
EXACT := tests/end_to_end tests/runtime tests/remat tests/verification/test_verify_plan.py \
	$(addprefix tests/profiling/,test_op_costs.py test_work.py test_real_strides.py test_whole_run.py)

SOAK := $(addprefix tests/end_to_end/,test_fuzz.py test_soak.py test_random_models.py test_loop_grammar.py) tests/cli/test_trust.py

# What `make test-torch` runs, with which torch, and where: all that can differ from one torch to the next.
VERSION ?= 2.15.0
OTHER := .venv-torch-$(VERSION)
TORCH_TESTS := $(addprefix tests/,analyze end_to_end experiments/test_trial.py ops optim profiling remat runtime \
	torch_compat trace verification)

.PHONY: install demo test quick soak test-long test-kernels test-torch test-accelerator check format docs wheels bench clients clean

install: $(STAMP)

# torch goes first and by its exact version, so that pip takes a local CPU wheel where there is one.
# $(call environment,folder,torch)
define environment
	@test -n "$(PYTHON)" || { echo "lowtide needs Python 3.11 or newer: install it, or say make PYTHON=/path/to/python3" >&2; exit 1; }
	$(1)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(1)
	$(1)/bin/python -m pip install --quiet "$(2)"
	$(1)/bin/python -m pip install --quiet -e ".[all]"
	@touch $(1)/.installed
endef

$(STAMP): pyproject.toml
	$(call environment,.venv,$(TORCH))

$(OTHER)/.installed: pyproject.toml
	$(call environment,$(OTHER),torch==$(VERSION))

demo: install
	$(BIN)/lowtide run tiny-gpt2 --batch-size 16 --sequence-length 128 --budget 60% -o lowtide-out --force

# The tests of exactness with another torch, in an environment of its own: make test-torch VERSION=2.14.1
test-torch: $(OTHER)/.installed
	$(QUIETLY) $(OTHER)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(TORCH_TESTS)

test: install
	$(PYTEST)

# In less than a minute: whatever does not train, profile or look at a whole model.
quick: install
	$(PYTEST) -m "not long and not slow"

# Every night: fuzzed inputs, long runs, many shapes and plans, 300 random (model, budget) pairs, 300 loops of a
# grammar (LOWTIDE_SEED=300 draws others). Half an hour.
soak: install
	$(PYTEST) -m long -rP --show-capture=stdout $(SOAK)

# Big models, more processes, and the rest of the grids of which `make test` has a sample.
test-long: install
	$(PYTEST) -m long $(addprefix --ignore=,$(SOAK))

# For somebody with a GPU: exactness, peaks, offload and timing on whatever torch.accelerator shows, in under ten
# minutes; it ends in a block to paste into an issue. ON=standin: on the stand-in that the tests have. With
# BIN=/path/to/venv/bin in the Python environment that is there, after `pip install -e ".[all]"` in it.
test-accelerator: $(if $(findstring command,$(origin BIN)),,install)
	@$(QUIETLY) $(BIN)/python tests/accelerator/report.py $(if $(ON),--on $(ON))

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

# The pages into docs/_build/html; any warning, such as a link that leads nowhere, is an error.
docs: install
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

# The sdist and a wheel that a package index takes, into dist/: its tag says which systems it runs on. The wheel is
# built from the sdist. Wheels for older systems are built in their containers: .github/workflows/release.yml.
wheels: install
	$(BIN)/python -m pip install --quiet -e ".[release]"
	rm -rf build/wheels dist && mkdir -p dist
	$(BIN)/python -m build --outdir build/wheels
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheels/*.whl
	mv build/wheels/*.tar.gz dist/
	$(BIN)/twine check --strict dist/*

# Hours; it goes on where it was stopped. `make bench ONLY=bert-base` runs the pieces that begin so.
bench: install
	$(BIN)/python bench/results.py --only "$(ONLY)"
	$(BIN)/python bench/peaks.py -o bench/out/peaks.csv
	$(BIN)/python bench/profile_modes.py transformer:8 bert-base:4 resnet152:4 -o bench/out/modes.csv

# Training code that people install, with and without a plan, in an environment of its own; an hour. It goes on where
# it was stopped. `make clients ONLY=trl` runs those whose names have this text.
CLIENTS := .venv-clients

$(CLIENTS)/.clients: pyproject.toml bench/clients/requirements.txt
	$(call environment,$(CLIENTS),$(TORCH))
	$(CLIENTS)/bin/python -m pip install --quiet -r bench/clients/requirements.txt
	@touch $@

clients: $(CLIENTS)/.clients
	$(QUIETLY) $(CLIENTS)/bin/python bench/client_suite.py --only "$(ONLY)" --markdown bench/out/clients.md

clean:
	rm -rf .venv .venv-* build dist docs/_build lowtide-out .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find bench src tests -name __pycache__ -prune -exec rm -rf {} +
