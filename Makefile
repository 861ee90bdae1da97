# Every target creates the environment that it needs, so all targets work on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Container images often set this variable. Without stored bytecode, each process compiles the sources of
# JAX and of the tests again, which takes 4 to 20 seconds.
unexport PYTHONDONTWRITEBYTECODE

# One test process per core, at most 8, because each takes about 2 GB. A process runs whole files,
# because the tests of a file share engines, servers and traced programs. The most expensive files
# run first (tests/support/durations.py), so that all processes end at about the same time.
PARALLEL := -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
# Additional options of pytest for `test` and `test-all`, such as -k NAME.
TEST_OPTIONS ?=
# Folder for the XML reports of the test runs and the cost of each file; none by default.
RESULTS ?=
# File with exact versions of the packages to install, such as .ci/locks/3.11.txt; none by default.
LOCK ?=
PIP = $(BIN)/python -m pip install --quiet --no-compile $(if $(LOCK),--constraint $(LOCK))

# The core has one test of every kind of thing, and needs neither torch nor other peers. `make aot` runs
# the tests that need the compilers for GPUs and TPUs.
CORE := not slow and not peers and not aot
FULL := not aot

# The compilers for GPUs and TPUs have their own environment, in which `import jax` looks for devices.
AOT_VENV ?= .venv-aot
# The version of jax in that environment, such as jax==0.10.2, and the tests that run there.
AOT_JAX ?= jax
AOT_TESTS ?= tests/kernels/test_aot_gpu.py tests/kernels/test_aot_other_gpus.py \
	tests/kernels/test_aot_mosaic_gpu.py tests/kernels/test_aot_tpu.py tests/kernels/test_aot_other_tpus.py \
	tests/kernels/test_aot_quantised.py
# Additional options of pytest for `aot`, such as -m "not slow": all kernels, in fewer sizes.
AOT_OPTIONS ?=

.PHONY: demo demo-chat test core test-all mutants quick lock lint docs pictures aot bench gpu gpu-more gpu-list clean

demo: $(VENV)/.demo
	$(BIN)/python -m paged_jax.generate --prompt "It is a truth universally acknowledged" --max-tokens 100

# The only target that downloads a model: 98 MB, into the user's cache folder.
demo-chat: $(VENV)/.chat
	$(BIN)/python -m paged_jax.chat --model "$$($(BIN)/python examples/fetch_smollm2.py)"

# Run the tests that a marker expression selects. Most of the time is compilation. Only tests of machine
# code compile with the default options, in a separate run, which also starts if the first run fails.
# All others use --unoptimised, which takes a third of the time.
report = $(if $(RESULTS),--junitxml=$(RESULTS)/$(1).xml --durations-json=$(RESULTS)/durations.json)
define run_tests
	status=0; \
	$(BIN)/python -m pytest $(PARALLEL) $(call report,tests) $(TEST_OPTIONS) -m "$(1) and not optimised" --unoptimised || status=1; \
	$(BIN)/python -m pytest $(PARALLEL) $(call report,optimised) $(TEST_OPTIONS) -m "$(1) and optimised" || status=1; \
	exit $$status
endef

test: lint core

core: $(VENV)/.test
	@$(call run_tests,$(CORE))

test-all: $(VENV)/.full lint
	@$(call run_tests,$(FULL))

# Apply single defects to the package, and run the tests that must find them; MUTANTS="--part cache"
# chooses some.
MUTANTS ?=

mutants: $(VENV)/.test
	$(BIN)/python -m tests.mutants --json mutants.json $(MUTANTS)

# Arguments of pytest for `quick`, such as TESTS="tests/sampling -k top_k"; all tests by default.
TESTS ?=

# The core without lint and without tests of machine code. Compiled programs are kept for the next run,
# but not for `test`, which runs as in a fresh clone.
quick: export JAX_COMPILATION_CACHE_DIR := $(CURDIR)/.jax_cache
quick: export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS := 0
quick: export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES := -1
quick: $(VENV)/.test
	$(BIN)/python -m pytest $(if $(TESTS),-n 0,$(PARALLEL)) -m "$(CORE)" --unoptimised $(TESTS)

# Write the versions that CI installs, with this Python, into .ci/locks.
lock:
	.ci/lock $(PYTHON)

# With all packages installed, imports that pyright cannot find are errors.
lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright $(if $(wildcard $(VENV)/.full),--warnings) --pythonpath $(BIN)/python

# Write the tables of the pages, and build the documentation site into site/. Broken links are errors.
docs: $(VENV)/.full
	JAX_PLATFORMS=cpu $(BIN)/python docs/make_tables.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# Draw the pictures and plots of the documentation. The results are committed.
pictures: $(VENV)/.full
	JAX_PLATFORMS=cpu $(BIN)/python docs/make_pictures.py
	JAX_PLATFORMS=cpu $(BIN)/python docs/make_cache_picture.py
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.plots

aot: $(AOT_VENV)/.aot
	JAX_PLATFORMS=cpu $(AOT_VENV)/bin/python -m pytest -n 2 --dist loadfile -o faulthandler_timeout=0 $(AOT_OPTIONS) $(AOT_TESTS)

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.allocator
	$(BIN)/python -m benchmarks.attention --goals
	$(BIN)/python -m benchmarks.step --goals
	$(BIN)/python -m benchmarks.generate
	$(BIN)/python examples/fetch_smollm2.py
	$(BIN)/python -m benchmarks.quantised
	$(BIN)/python -m benchmarks.host
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.schedule
	$(BIN)/python -m benchmarks.kv_dtype
	$(BIN)/python -m benchmarks.serving
	$(BIN)/python -m benchmarks.http_server

# The most valuable measurements on a GPU, in GPU_BUDGET seconds, with the installed Python: nothing is
# installed or downloaded. `make gpu-more` runs all others, half an hour; `make gpu-STAGE` one stage;
# `make gpu-list` lists the stages.
GPU_OUT ?= gpu-results
GPU_BUDGET ?= 540

gpu:
	$(PYTHON) -m benchmarks.gpu --total $(GPU_BUDGET) --out $(GPU_OUT)

gpu-more:
	$(PYTHON) -m benchmarks.gpu --more --out $(GPU_OUT)

gpu-list:
	$(PYTHON) -m benchmarks.gpu --dry-run

gpu-%:
	$(PYTHON) -m benchmarks.gpu --stage $* --out $(GPU_OUT)

clean:
	rm -rf $(VENV) $(AOT_VENV) .jax_cache site build dist *.egg-info

# The pip of Python 3.11 takes twice as long to resolve the dependencies.
$(BIN)/python:
	$(PYTHON) -m venv --upgrade-deps $(VENV)

$(AOT_VENV)/bin/python:
	$(PYTHON) -m venv --upgrade-deps $(AOT_VENV)

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(PIP) --editable .
	touch $@

$(VENV)/.chat: $(VENV)/.demo
	$(PIP) --editable ".[gguf]"
	touch $@

# pyright runs on Node.js, which pip can also install.
EXTRAS := serve,structured,gguf,bench,completion
NODE := $(shell command -v node >/dev/null || echo "pyright[nodejs]")

$(VENV)/.test: pyproject.toml | $(BIN)/python
	@echo "installing 800 MB of packages into $(VENV), once; this takes minutes"
	$(PIP) --editable ".[$(EXTRAS)]" --group test --group lint $(NODE)
	touch $@ $(VENV)/.demo

$(VENV)/.full: pyproject.toml | $(BIN)/python
	@echo "installing 3 GB of packages into $(VENV), once; this takes minutes"
	$(PIP) --editable ".[$(EXTRAS)]" --group full $(NODE)
	touch $@ $(VENV)/.test $(VENV)/.demo

$(VENV)/.bench: $(VENV)/.full
	$(PIP) --editable ".[benchmarks]"
	touch $@

$(AOT_VENV)/.aot: pyproject.toml | $(AOT_VENV)/bin/python
	$(AOT_VENV)/bin/python -m pip install --quiet --no-compile $(if $(LOCK),--constraint $(LOCK)) --editable ".[$(EXTRAS),aot]" --group test "$(AOT_JAX)"
	touch $@
