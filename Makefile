# make train   train the handwritten digits on this machine, with a progress view and checkpoints; again: continue
# make test    check the style and run the whole test suite
# make test-clusters   real jobs in a Slurm and a Grid Engine of our own, where these are installed (docs/clusters.md)
# make campaign   a thousand random training scripts on every world, beside plain torch; the tests that `make test`
#                 leaves out since their like is in it or for their length, and properties with other examples each time
#                 (about an hour); then 520 faults (an hour, as root)
# make mutants    plant errors in the code and see which test notices each (about an hour)
# make test-gpu   what only GPUs can show, on a machine that has some (docs/gpu.md, which it writes)
# make surface   what is public: write the list that the tests compare (docs/versioning.md)
# make dist    the wheel and the source distribution, in dist
# make try-installs   the wheel in empty environments, with the oldest and the newest Python and torch (gigabytes, an hour)
# make sbom    what an installation brings, as a CycloneDX bill of materials: dist/sbom.cdx.json
# make check-release, make publish   is this commit a release? build it; and upload it (docs/releasing.md)
# make docs    the site of the documentation, in docs/_build/index.html
# make lint    only the style: ruff and mypy, which reads a script of a user as well (tests/harness/typed_use.py)
# make clean   remove what was installed and cached; runs stay
#
# Each of them first sets up what it needs, in .venv. Wanted beforehand: make, and Python 3.11 or newer.

PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11 python,\
	$(shell $(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name))))
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
LINT := $(BIN)/ruff check --quiet . && $(BIN)/ruff format --quiet --check . && $(BIN)/mypy --no-error-summary
RUN_DIR ?= runs/digits
# Lists nothing and fails where there is no usable GPU, even if the command is there.
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
RANKS ?= $(if $(filter-out 0,$(GPUS)),gpu,2)

.PHONY: train test test-clusters test-gpu campaign mutants surface dist try-installs sbom check-release publish docs lint clean
.DEFAULT_GOAL := test

train: .venv/.ready
	@$(BIN)/lockstep run --nproc-per-node $(RANKS) --run-dir $(RUN_DIR) $(if $(wildcard $(RUN_DIR)/run.json),--resume) examples/digits.py
	@echo "kept in $(RUN_DIR); as a file: $(BIN)/lockstep export $(RUN_DIR) model.safetensors; your own script: docs/from-single-gpu.md"

# `auto`: two workers more than there are cores, for tests also wait (tests/conftest.py). The tests start hundreds of
# processes: each reads the bytecode of this package where it may be written, else it compiles all modules anew.
# The style is checked meanwhile, for mypy keeps one core busy for a minute; either of the two can fail it.
test: .venv/.ready
	@echo "ruff, mypy"; ($(LINT)) & lint=$$!; \
	echo "pytest"; \
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n auto; tests=$$?; \
	wait $$lint && exit $$tests

# On a machine with GPUs, which all tests share; docs/gpu.md says then what was tried.
test-gpu: .venv/.ready
	@LOCKSTEP_GPU_TABLE=1 $(BIN)/python -m pytest -q -rs -n 8 --dist worksteal tests/gpu

test-clusters: .venv/.ready
	@$(BIN)/python -m pytest -q -rs -o faulthandler_timeout=1500 tests/clusters

# Its tests are the long ones: five times the time of the suite's for each.
campaign: .venv/.ready
	@LOCKSTEP_RANDOM_SCRIPTS=1000 $(BIN)/python -m pytest -q -p no:randomly --timeout 7200 tests/promises/test_random_scripts.py
	@PYTHONDONTWRITEBYTECODE= LOCKSTEP_CAMPAIGN=1 $(BIN)/python -m pytest -q -n auto --timeout 600 -o faulthandler_timeout=900
	@$(BIN)/python benchmarks/campaign.py --faults 520

mutants: .venv/.ready
	@$(BIN)/python tests/harness/mutants.py

surface: .venv/.ready
	@$(BIN)/python tests/harness/public_surface.py

dist: .venv/.ready
	@$(BIN)/python -m build --no-isolation --outdir dist .
	@$(BIN)/python -m twine check --strict dist/*.whl dist/*.tar.gz

PYTHONS ?= 3.11 3.12 3.13 3.14
TORCHES ?= 2.11.0 2.15.0
TRIED ?= tests/unit tests/ranks/test_private_names.py tests/ranks/checkpoint tests/ranks/collectives
try-installs: .venv/.ready
	@$(BIN)/python tests/harness/installed.py --python $(PYTHONS) --torch $(TORCHES) --tests $(TRIED)

sbom: .venv/.ready
	@$(BIN)/python release/sbom.py dist/sbom.cdx.json

check-release: .venv/.ready
	@$(BIN)/python release/publish.py --dry-run

publish: .venv/.ready
	@$(BIN)/python release/publish.py

# Warnings are errors: links without a target, pages in no table of contents.
docs: .venv/.ready
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build
	@echo "docs/_build/index.html"

lint: .venv/.ready
	@echo "ruff, mypy"
	@$(LINT)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis dist docs/_build
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

# Where there is no NVIDIA GPU, this exact torch is asked for, and first: anything looser may bring gigabytes of CUDA.
.venv/.ready: pyproject.toml Makefile
	@test -n "$(PYTHON)" || { echo "Lockstep needs Python 3.11 or newer and found none; name one: make PYTHON=/path/to/python3.12" >&2; exit 2; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo "setting up: a virtual environment in .venv, with $(PYTHON)"; $(PYTHON) -m venv .venv; }
	@if command -v nvidia-smi >/dev/null 2>&1; then \
		echo "setting up: torch for NVIDIA GPUs (some gigabytes; this takes minutes)"; $(PIP) "torch>=2.11" torchvision; \
	else \
		echo "setting up: torch for the CPU"; $(PIP) torch==2.13.0 && $(PIP) --no-deps torchvision==0.28.0; \
	fi
	@echo "setting up: Lockstep, its examples and its tests"
	@$(PIP) --editable '.[dev,docs,examples,release]'
	@$(BIN)/python examples/vision.py
	@touch $@
