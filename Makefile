# The commands of embstore: `make help` lists them.
#
# Steps of `make setup` leave stamps in .venv/ (environment) and build/ (the package). A stamp of the
# environment carries a checksum of what it installed, so a change of a list below repeats that step only.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
BIN := $(VENV)/bin
LOG := build/setup.log

export PATH := $(CURDIR)/$(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
unexport PYTHONPATH PYTHONHOME

# ------------------------------------------------------------------------------------------------
# What is installed, in this order: a package that pins torch loosely must find it in place.

# To build and run it, and then to test it; `make demo` needs the first alone.

STEPS := torch fbgemm torchrec-needs torchrec build-tools extras
TEST_STEPS := tensorflow dev-tools

PIP_torch := torch==2.13.0
PIP_fbgemm := fbgemm-gpu-cpu==1.8.0
PIP_torchrec-needs := tensordict torchmetrics==1.0.3 pyre-extensions tqdm numpy
PIP_torchrec := --no-deps torchrec==1.8.0
PIP_build-tools := scikit-build-core>=0.11 nanobind>=2.7 ninja cmake>=3.19
PIP_dev-tools := pytest pytest-timeout pytest-xdist hypothesis ruff mypy clang-format==23.1.3 build \
  pandas xxhash httpx tensorboard s3fs moto[server] atheris
PIP_extras := typer rich matplotlib pyarrow safetensors redis hiredis \
  fastapi uvicorn prometheus-client swagger-ui-bundle fsspec
PIP_docs := mkdocs>=1.6,<2 mkdocs-material>=9.5 mkdocstrings[python]>=0.26
PIP_tensorflow := tensorflow-cpu==2.21.0 tf_keras==2.21.0
PIP_peers := rocksdict

CPP_FILES := $(shell find core bindings -type f \( -name '*.h' -o -name '*.cpp' -o -name '*.inc' \) 2>/dev/null)
# Directories count as well: their time changes when a file is removed.
PACKAGE_SOURCES := pyproject.toml CMakeLists.txt \
  $(filter-out core/tests/%,$(CPP_FILES)) \
  $(shell find core/src core/include bindings -type d 2>/dev/null)

# ------------------------------------------------------------------------------------------------
# $(call step,<what is said>,<command>): one line on the screen, the rest in the log.

define step
@mkdir -p build; printf '  %s ... ' "$(1)"; start=$$SECONDS; printf '\n== %s\n' "$(1)" >>$(LOG); \
if ( $(2) ) >>$(LOG) 2>&1 </dev/null; then echo "done ($$((SECONDS - start)) s)"; \
else echo "FAILED; the end of $(LOG):"; tail -n 40 $(LOG); exit 1; fi
endef

checksum = $(firstword $(shell printf '%s' '$(1)' | cksum))
stamp = $(VENV)/.done-$(1).$(call checksum,$(PIP_$(1)))
# `make setup LOCKED=1`: the files of requirements.lock instead; the environment then stays with them.
LOCKED ?= $(if $(wildcard $(VENV)/.done-locked.*),1)
ifeq ($(LOCKED),1)
STAMPS := $(VENV)/.done-locked.$(firstword $(shell cksum requirements.lock))
TEST_STAMPS := $(STAMPS)
else
STAMPS := $(foreach s,$(STEPS),$(call stamp,$(s)))
TEST_STAMPS := $(foreach s,$(TEST_STEPS),$(call stamp,$(s)))
endif
PACKAGE := build/.done-package
# An editable install keeps a list of modules, so it is repeated when one comes or goes.
MODULES := build/.modules.$(call checksum,$(sort $(shell find src -name '*.py')))

.PHONY: setup wheel docs demo test lint format bench movielens sanitize sanitize-python trust lock sbom clean help test-cpp test-py

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

# ------------------------------------------------------------------------------------------------

setup: $(VENV)/.done-redis-server $(VENV)/.done-chromium $(TEST_STAMPS) $(PACKAGE)  ## create .venv with all that is needed and build the package into it
	@[ $(MAKELEVEL) -gt 0 ] || echo "setup: ready ($(VENV))"

$(VENV)/.done-venv:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "embstore needs Python 3.10 or newer, but $(PYTHON) is: $$("$(PYTHON)" -V 2>&1 || true)"; \
	  echo "Name another with: make setup PYTHON=/path/to/python3.12"; exit 1; }
	@command -v "$${CXX:-c++}" >/dev/null || { \
	  echo "embstore needs a C++20 compiler (GCC 11 or Clang 14, or newer), but there is no $${CXX:-c++}"; exit 1; }
	$(call step,virtual environment,[ -x $(BIN)/pip ] || "$(PYTHON)" -m venv $(VENV))
	@touch $@

# Each step waits for the one before it: .done-venv, then STEPS and TEST_STEPS from left to right.
define pip_rule
$(call stamp,$(1)): $(2)
	$$(call step,$(1),$(BIN)/python -m pip install --no-input $(foreach r,$(PIP_$(1)),'$(r)'))
	@rm -f $(VENV)/.done-$(1).*; touch $$@
endef
previous := $(VENV)/.done-venv
$(foreach s,$(STEPS) $(TEST_STEPS),$(eval $(call pip_rule,$(s),$(previous)))$(eval previous := $(call stamp,$(s))))

$(VENV)/.done-locked.%: $(VENV)/.done-venv
	@$(BIN)/python -c 'import platform, sys; sys.exit((*sys.version_info[:2], sys.platform, platform.machine()) \
	  != (3, 11, "linux", "x86_64"))' || { echo "requirements.lock is for CPython 3.11 on Linux x86-64"; exit 1; }
	$(call step,the packages of requirements.lock,$(BIN)/python -m pip install --no-input --require-hashes --no-deps \
	  -r requirements.lock)
	@rm -f $(VENV)/.done-locked.*; touch $@

# Programs that tests start: a server for the Redis store, a browser for pages. Tried, never required.
define system_program
$(VENV)/.done-$(1): | $(VENV)/.done-venv
	@mkdir -p build; if command -v $(1) >/dev/null; then :; \
	elif [ "$$$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  printf '  $(1) ... '; export DEBIAN_FRONTEND=noninteractive; \
	  install() { timeout 600 apt-get install -y --no-install-recommends $(1); }; \
	  if { install || { timeout 120 apt-get update && install; }; } >>$(LOG) 2>&1 </dev/null; \
	  then echo done; else echo 'not installed (see $(LOG)); tests that need it are skipped'; fi; \
	else echo '  $(1) is missing; tests that need it are skipped'; fi
	@touch $$@
endef
$(foreach program,redis-server chromium,$(eval $(call system_program,$(program))))

# The C++ tests share this build directory, so the engine is compiled once for both.
$(MODULES):
	@mkdir -p build; rm -f build/.modules.*; touch $@

$(PACKAGE): $(STAMPS) $(PACKAGE_SOURCES) $(MODULES)
	@mkdir -p build; touch $@-started  # a file saved while this runs has to count as newer
	$(call step,embstore,$(BIN)/python -m pip install --no-input --no-build-isolation --no-deps \
	  -C build-dir=build/cpp -C cmake.define.EMBSTORE_BUILD_TESTS=ON -e .)
	@mv $@-started $@

# ------------------------------------------------------------------------------------------------

# make demo DATA=ratings.csv: a file of MovieLens or Criteo instead of the click stream
demo: $(PACKAGE)  ## train on two ranks, dump, restart, serve; ends with a table and report.html
	@$(BIN)/python -m examples.demo $(if $(DATA),--data '$(DATA)')

# Lint is one process for most of its time, so it runs beside the C++ tests.
test: setup  ## everything: lint, C++ tests, Python tests
	@trap wait EXIT; $(MAKE) lint & lint=$$!; $(MAKE) test-cpp; wait $$lint
	@$(MAKE) test-py

test-cpp: setup  ## the C++ tests
	$(call step,C++ tests: build,$(BIN)/cmake --build build/cpp)
	@$(BIN)/ctest --test-dir build/cpp --output-on-failure --no-tests=ignore -j $(JOBS)

# Each of the workers takes a file at a time; tests/conftest.py says in which order. There is one more than cores:
# tests that cut a wire or kill a rank wait for timeouts.
WORKERS ?= $(shell n=$(JOBS); echo $$((n < 4 ? n + 1 : 4)))
test-py: setup  ## the Python tests
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

lint: setup  ## formatting, lint and types
	@$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --check . || true; echo 'try: make format'; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@[ -z "$(CPP_FILES)" ] || $(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	@echo "lint: clean"

format: setup  ## rewrite the sources as lint wants them
	@$(BIN)/ruff check --quiet --fix . || true
	@$(BIN)/ruff format --quiet .
	@[ -z "$(CPP_FILES)" ] || $(BIN)/clang-format -i $(CPP_FILES)

# Only benchmarks need these: RocksDB, and TFRA with the TensorFlow that it was built for.
PEERS := $(VENV)/.done-peers.$(call checksum,$(PIP_peers))
$(PEERS): $(lastword $(TEST_STAMPS))
	$(call step,peers,$(BIN)/python -m pip install --no-input $(foreach r,$(PIP_peers),'$(r)'))
	@rm -f $(VENV)/.done-peers.*; touch $@

bench: setup $(PEERS)  ## compare with FBGEMM, torch, TorchRec, RocksDB and TFRA; writes build/bench.json
	@mkdir -p build
	@[ -x build/tfra/bin/python ] || $(BIN)/python -m benchmarks.tfra --make-environment
	@$(BIN)/python -m benchmarks

movielens: setup  ## prediction under a budget of rows: every strategy, the hashing trick, an oracle (5 minutes)
	@$(BIN)/python -m benchmarks.movielens

# TSan of older compilers cannot live with much address randomization; setarch -R turns it off.
SANITIZE := -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DEMBSTORE_BUILD_TESTS=ON -DEMBSTORE_BUILD_PYTHON=OFF \
  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO='-O1 -g'
NO_RANDOM := $(shell setarch -R true 2>/dev/null && echo setarch -R)
sanitize: setup  ## the C++ tests under ASan + UBSan, then under TSan
	$(call step,build with ASan and UBSan,$(BIN)/cmake -S . -B build/asan $(SANITIZE) \
	  '-DEMBSTORE_SANITIZE=address;undefined' && $(BIN)/cmake --build build/asan)
	@ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1 \
	  $(BIN)/ctest --test-dir build/asan --output-on-failure --no-tests=ignore -j $(JOBS)
	$(call step,build with TSan,$(BIN)/cmake -S . -B build/tsan $(SANITIZE) \
	  -DEMBSTORE_SANITIZE=thread && $(BIN)/cmake --build build/tsan)
	@TSAN_OPTIONS=halt_on_error=1:die_after_fork=0 $(NO_RANDOM) \
	  $(BIN)/ctest --test-dir build/tsan --output-on-failure --no-tests=ignore

# What moves most memory: operations at random, damaged files, stores, threads. The runtime of C++ is loaded first, for
# ASan to find it. Python itself leaks, so leaks are left to the C++ tests; bus errors are left to the store's handler.
ASAN_TESTS := tests/trust/test_state_machines.py tests/trust/test_fuzz.py tests/trust/test_forged_files.py \
  tests/native/test_state_machine.py \
  tests/native/test_table.py tests/native/test_bad_input.py tests/native/test_concurrency.py \
  tests/stores/test_ssd_store.py tests/stores/test_ssd_format.py tests/stores/test_table_over_store.py
sanitize-python: setup  ## tests of the Python extension under ASan + UBSan
	$(call step,build the extension with ASan and UBSan,$(BIN)/cmake -S . -B build/asan-python $(SANITIZE) \
	  -DEMBSTORE_BUILD_TESTS=OFF -DEMBSTORE_BUILD_PYTHON=ON -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	  '-DEMBSTORE_SANITIZE=address;undefined' && $(BIN)/cmake --build build/asan-python --target _core)
	@libraries=$$(for name in libasan.so libubsan.so libstdc++.so; do "$${CXX:-c++}" -print-file-name=$$name; done); \
	LD_PRELOAD="$$(echo $$libraries)" ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:handle_sigbus=0 \
	UBSAN_OPTIONS=print_stacktrace=1 EMBSTORE_CORE=$$(ls $(CURDIR)/build/asan-python/_core*.so) \
	  $(BIN)/python -m pytest -p trust.sanitized_core -o timeout=600 -q $(ASAN_TESTS)

trust: setup  ## the long attacks; docs/reliability.md has the last results
	@$(BIN)/python -m trust.same_bits
	@$(BIN)/python -m trust.ranks
	@$(BIN)/python -m trust.network
	@$(BIN)/python -m trust.failover
	@$(BIN)/python -m trust.state_machines
	@$(BIN)/python -m trust.faults
	@$(BIN)/python -m trust.kills
	@$(BIN)/python -m trust.fuzz
	@$(BIN)/python -m trust.fuzz_core
	@$(BIN)/python -m trust.mutation
	@$(BIN)/python -m trust.soak
	@$(BIN)/python -m trust.load
	@$(BIN)/python -m trust.plan_check

lock: setup  ## requirements.lock: the versions and hashes of what .venv has
	@$(BIN)/python .ci/lock

sbom: setup  ## what the wheel depends on, as CycloneDX in build/sbom.json
	@$(BIN)/python .ci/sbom build/sbom.json

wheel:  ## wheels for CPython 3.10 to 3.13 in dist/, each tested without a compiler
	@.ci/wheels

# Only this step installs what builds the pages.
DOCS := $(VENV)/.done-docs.$(call checksum,$(PIP_docs))
$(DOCS): $(lastword $(TEST_STAMPS))
	$(call step,docs tools,$(BIN)/python -m pip install --no-input $(foreach r,$(PIP_docs),'$(r)'))
	@rm -f $(VENV)/.done-docs.*; touch $@

docs: setup $(DOCS)  ## the documentation as pages that work offline, in build/site
	@$(BIN)/python tests/compatibility/page.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "docs: open build/site/index.html"

clean:  ## remove all that was built; .venv stays
	@rm -rf build dist src/embstore/_core.pyi .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
