# One word per need. `make test` is all that the checks run; nothing here needs root or Slurm, and both are used where they are there.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help venv demo docs lint test test-fast lab-packages browser workflows after-training clean

VENV ?= .venv
BIN := $(VENV)/bin
# The content of the two files decides whether the environment is up to date, so a fresh checkout's times do not matter.
STAMP := $(VENV)/.made-$(shell cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)

INSTALL_LAB := from hpctrain.lab.layout import SlurmInstallation; from hpctrain.lab.machine import this_machine; \
	from hpctrain.lab.requirements import install; install(this_machine(), SlurmInstallation(None))

help: ## list the recipes
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

venv: $(STAMP) ## set up .venv; instant when nothing changed

$(STAMP):
	tools/make-venv $(VENV)
	@rm -f $(VENV)/.made-*
	@touch $@

demo: venv ## probe, plan, train, lose a worker and recover, on this machine
	$(BIN)/hpctrain demo

docs: venv ## build the site of the documents into build/site; open build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

lint: venv ## style, types and the layers of the house
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: venv lint lab-packages browser workflows after-training ## lint and the whole suite; what this machine cannot run is listed by name
	tools/run-tests $(BIN)/pytest

# As root on Debian the lab and images can run; as anybody else their tests are left out, and listed. A machine whose
# mirror has no Apptainer or no newer Slurm leaves theirs out, unless HPCTRAIN_REQUIRE names them.
lab-packages: venv
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  $(BIN)/python -c "$(INSTALL_LAB)" || exit 1; \
	  tools/install-slurm-next "$${HPCTRAIN_SLURM_NEXT:-/opt/slurm-next}" >/dev/null || \
	    echo "make: no newer Slurm: its tests are left out" >&2; \
	  tools/install-apptainer >/dev/null || echo "make: no apptainer: tests of images are left out" >&2; \
	fi

# Debian's browser, in which tests open reports; 350 MB. Without it they are left out.
browser:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  tools/install-chromium || echo "make: no chromium: tests of reports in a browser are left out" >&2; \
	fi

# A machine without these packages leaves the tests of the recipes for Snakemake and Nextflow out.
workflows: venv
	@tools/install-workflows $(BIN)/python build/workflows || echo "make: no Snakemake: tests of recipes are left out" >&2

# A machine without these packages leaves the tests of the recipes in docs/after-training.md out.
after-training: venv
	@tools/install-after-training $(BIN)/python build/after-training || \
	  echo "make: no lm-evaluation-harness: tests of recipes after the training are left out" >&2

test-fast: venv ## the part of the suite that starts no processes: about a minute on two cores
	tools/run-tests $(BIN)/pytest fast

clean: ## remove what the recipes made, .venv included; runs stay
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
