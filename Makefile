# Every target makes the environment it needs: a clone with git, make and some
# Python >= 3.12 is enough. Extra arguments go through ARGS, for example
#   make test ARGS="tests/kernels -k value"

PYTHON_IN_VENV := .venv/bin/python
PIP_INSTALL := $(PYTHON_IN_VENV) -m pip install -qq \
  --disable-pip-version-check -c constraints.txt
WORKERS ?= 2
ARGS ?=
# `make test MARKS="slow or not slow"` runs both kinds, sooner than one after
# the other.
MARKS ?= not slow
# Each worker takes whole files as long as it can, and their fixtures once.
PYTEST = JAX_PLATFORMS=cpu $(PYTHON_IN_VENV) -m pytest -n $(WORKERS) \
  --dist=worksteal --durations=15

# A half-made environment, or one of an older Python, is made anew.
define make_venv
@$(PYTHON_IN_VENV) -c "import sys, pip; assert sys.version_info >= (3, 12)" \
  2>/dev/null || { python=$$(tools/find_python) && \
  echo "Making .venv with $$python" && "$$python" -m venv --clear .venv; }
endef

# Arrays of a training step are tens of MB. Without huge pages (Linux, glibc)
# page faults on fresh ones take up to half the time of an attention pass.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help quickstart test test-slow test-hopper lint format clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' \
	  Makefile
	@echo '  Extra arguments: make test ARGS="-k mask". CPU workers: WORKERS=2.'

quickstart: .venv/.installed  ## Decode with the embedded tiny target
	$(PYTHON_IN_VENV) -m experiments.quickstart $(ARGS)

test: .venv/.installed  ## Run the fast tests on the CPU
	$(PYTEST) -m "$(MARKS)" $(ARGS)

# pytest exits with 5 when no test carries the marker, which is no failure.
test-slow: .venv/.installed  ## Run the slow tests on the CPU
	$(PYTEST) -m slow $(ARGS) || [ $$? -eq 5 ]

# Triton and JAX's CUDA plugin lie beside the environment, not in it: a JAX that
# finds the plugin but no GPU complains in every other command.
HOPPER := .venv/hopper
HOPPER_PYTEST = PYTHONPATH=$(HOPPER) $(PYTEST) -m hopper tests/kernels

test-hopper: $(HOPPER)/.installed  ## Check the kernels for Hopper, without a GPU
	TRITON_INTERPRET=1 $(HOPPER_PYTEST) $(ARGS) || [ $$? -eq 5 ]
	$(HOPPER_PYTEST) $(ARGS) || [ $$? -eq 5 ]

lint: .venv/.installed-dev  ## Check style, format and types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyrefly check

format: .venv/.installed-dev  ## Sort imports and format the code
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

clean:  ## Remove the environment and all caches; keeps runs/
	rm -rf .venv build dist ./*.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.installed: pyproject.toml constraints.txt
	$(make_venv)
	@echo "Installing the project and its test tools (about a minute) ..."
	@$(PIP_INSTALL) -e ".[test]"
	@touch $@

# Installs what .installed does and more, so it stands for both.
.venv/.installed-dev: pyproject.toml constraints.txt
	$(make_venv)
	@echo "Installing the project and its dev tools (about a minute) ..."
	@$(PIP_INSTALL) -e ".[dev]"
	@touch .venv/.installed $@

$(HOPPER)/.installed: pyproject.toml constraints.txt | .venv/.installed
	@echo "Installing Triton and JAX's CUDA plugin (half a minute) ..."
	@$(PIP_INSTALL) --no-deps --upgrade --target $(HOPPER) \
	  jax-cuda13-plugin jax-cuda13-pjrt jax-triton triton
	@touch $@
