# Everything here sets up .venv by itself; a second call does not reinstall.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
WORKERS ?= -n auto --dist worksteal
TORCH_INDEX ?=
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Bytecode is kept, whatever the environment says: each interpreter that tests start would compile all modules again
export PYTHONDONTWRITEBYTECODE =

.PHONY: help install demo docs dist test test-long check lint types pytest test-gpu gpu-report gpu-wheels gpu-text format clean
help:
	@echo "make install             the environment .venv alone"
	@echo "make demo                from the text on this machine to a speaking headless model (about 15 minutes)"
	@echo "make demo ARGS=--quick   the same with less text and fewer steps, to see it first (about 2 minutes)"
	@echo "make demo ARGS='--model llama'   with a Llama instead of Pythia's shape"
	@echo "make test                the checks and the quick tests (ARGS: pytest's own, such as ARGS='-n0 -x tests/models')"
	@echo "make test-long           the tests that take long: larger matrices, random kills, installed packages, memory"
	@echo "make check               format, lint, types, direction of imports"
	@echo "make docs                the documentation as a site: build/site/index.html (ARGS=serve: on this machine's port 8000)"
	@echo "make dist                the package as dist/megahead-VERSION.whl and .tar.gz, for \`pip install\` elsewhere"
	@echo "make test-gpu            the tests that need a CUDA device (GPU_PYTHON=python3: by that interpreter, installing nothing)"
	@echo "make gpu-report          all measurements on a GPU in 45 minutes (ARGS: of tools/gpu_report.py)"
	@echo "make gpu-text            a text as a dataset to be carried there, too (ARGS='--input F --tokenizer JSON')"
	@echo "make gpu-wheels          what a GPU machine without a network lacks, to be carried there with the checkout"

.venv/.torch:
	@echo "installing into .venv: some minutes, on Linux some GB (TORCH_INDEX=https://download.pytorch.org/whl/cpu: torch without CUDA)"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install torch==2.13.0 $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@touch $@

.venv/.installed: pyproject.toml .venv/.torch
	$(BIN)/pip install -e .
	@touch $@

.venv/.installed-test: pyproject.toml .venv/.installed
	$(BIN)/pip install -q -e '.[test]'
	@touch $@

.venv/.installed-docs: pyproject.toml .venv/.installed
	$(BIN)/pip install -q -e '.[docs]'
	@touch $@

install: .venv/.installed

docs: .venv/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(or $(ARGS),build) -f tools/website/mkdocs.yml

.venv/.installed-dist: .venv/.torch
	$(BIN)/pip install -q 'build>=1.2'
	@touch $@

# the wheel is made of the sdist, in a folder of its own: nothing that lies in the checkout gets into it by accident
dist: .venv/.installed-dist
	rm -rf dist
	$(BIN)/python -m build $(ARGS)

demo: .venv/.installed
	@$(BIN)/python tools/demo.py $(ARGS)

check: lint types

lint: .venv/.installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: .venv/.installed-test
	$(BIN)/mypy

test: lint
	@$(MAKE) --no-print-directory -j2 pytest types

pytest: .venv/.installed-test
	$(BIN)/python -m pytest -m "not long" $(WORKERS) $(ARGS)

test-long: .venv/.installed-test
	$(BIN)/python -m pytest -m long $(WORKERS) $(ARGS)

# GPU_PYTHON: an interpreter that has torch already, where nothing can be installed; wheels in gpu-wheels/ are laid
# beside it, and the checkout is found by its path, also by what tests start
GPU_WORKERS ?= -n 6 --dist worksteal
GPU_WHEELS := $(wildcard gpu-wheels/*.whl)
GPU_SITE := build/gpu-site
GPU_NEEDS = $(if $(GPU_PYTHON),$(if $(GPU_WHEELS),$(GPU_SITE)/.laid),.venv/.installed-test)
GPU_RUN = PYTHONPATH=$(CURDIR)$(if $(GPU_PYTHON),:$(CURDIR)/$(GPU_SITE)) $(or $(GPU_PYTHON),$(BIN)/python)

$(GPU_SITE)/.laid: $(GPU_WHEELS)
	rm -rf $(GPU_SITE)
	$(GPU_PYTHON) -m pip install -q --no-index --no-deps --no-compile --target $(GPU_SITE) $(GPU_WHEELS)
	@touch $@

.SECONDEXPANSION:
test-gpu: $$(GPU_NEEDS)
	$(GPU_RUN) -m pytest -m gpu tests/gpu tests/losses tests/optim $(GPU_WORKERS) $(ARGS)

gpu-report: $$(GPU_NEEDS)
	$(GPU_RUN) tools/gpu_report.py $(ARGS)

gpu-wheels: .venv/.installed-test
	$(BIN)/python tools/gpu_wheels.py $(ARGS)

gpu-text: .venv/.installed-test
	$(BIN)/python tools/preprocess.py --output build/gpu-text/text --holdout 200 $(ARGS)

format: .venv/.installed-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv runs demo demo-quick demo-llama demo-quick-llama gpu-wheels dist $(GPU_SITE)
