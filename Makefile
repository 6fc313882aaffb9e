# Needs Python 3.10 or newer and make; everything else goes into $(VENV).
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
BIN = $(VENV)/bin

.PHONY: demo test clean

demo: $(VENV)/demo.installed
	$(BIN)/gradfilter demo

# One thread a worker: the workers are the parallelism.
test: $(VENV)/dev.installed
	$(BIN)/ruff check .
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

$(VENV)/%.installed: pyproject.toml $(wildcard setup.py src/gradfilter/kernels/*.c src/gradfilter/kernels/lanes/*.c)
	@echo "installing gradfilter[$*] into $(VENV): a few minutes the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

clean:
	rm -rf $(VENV) build dist
