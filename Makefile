# Every target creates the environment that it needs, so all targets work on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# One test process per core, at most 8, because each takes about 2 GB. A process runs whole files,
# because the tests of a file share engines, servers and traced programs. The most expensive files
# run first (tests/support/durations.py), so that all processes end at about the same time.
PARALLEL := -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
# Additional options of pytest for `test`, such as --check-durations.
TEST_OPTIONS ?=

# The compilers for GPUs and TPUs have their own environment, in which `import jax` looks for devices.
AOT_VENV ?= .venv-aot
# The version of jax in that environment, such as jax==0.10.2, and the tests that run there.
AOT_JAX ?= jax
AOT_TESTS ?= tests/kernels/test_aot_gpu.py tests/kernels/test_aot_other_gpus.py \
	tests/kernels/test_aot_mosaic_gpu.py tests/kernels/test_aot_tpu.py tests/kernels/test_aot_other_tpus.py \
	tests/kernels/test_aot_quantised.py
# Additional options of pytest for `aot`, such as -m "not slow": all kernels, in fewer sizes.
AOT_OPTIONS ?=

.PHONY: demo demo-chat test quick durations lint docs pictures aot bench gpu gpu-list clean

demo: $(VENV)/.demo
	$(BIN)/python -m paged_jax.generate --prompt "It is a truth universally acknowledged" --max-tokens 100

# The only target that downloads a model: 98 MB, into the user's cache folder.
demo-chat: $(VENV)/.chat
	$(BIN)/python -m paged_jax.chat --model "$$($(BIN)/python examples/fetch_smollm2.py)"

# Most of the time is compilation. Only tests of machine code compile with the default options, in a
# separate run. All others use --unoptimised, which takes a third of the time.
test: $(VENV)/.test lint
	$(BIN)/python -m pytest $(PARALLEL) $(TEST_OPTIONS) -m "not optimised" --unoptimised
	$(BIN)/python -m pytest $(PARALLEL) $(TEST_OPTIONS) -m optimised

# Arguments of pytest for `quick`, such as TESTS="tests/sampling -k top_k"; all tests by default.
TESTS ?=

# Compiled programs are kept for the next run, but not for `test`, which runs as in a fresh clone.
quick: export JAX_COMPILATION_CACHE_DIR := $(CURDIR)/.jax_cache
quick: export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS := 0
quick: export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES := -1
quick: $(VENV)/.test
	$(BIN)/python -m pytest $(if $(TESTS),-n 0,$(PARALLEL)) -m "not slow" --unoptimised $(TESTS)

# Measure the cost of each test file, and write it to the table in tests/durations.md.
durations:
	rm -f durations.json
	$(MAKE) test TEST_OPTIONS="--durations-json=durations.json"
	$(BIN)/python -m tests.support.durations durations.json

lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# Write the tables of the pages, and build the documentation site into site/. Broken links are errors.
docs: $(VENV)/.test
	JAX_PLATFORMS=cpu $(BIN)/python docs/make_tables.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# Draw the pictures and plots of the documentation. The results are committed.
pictures: $(VENV)/.test
	JAX_PLATFORMS=cpu $(BIN)/python docs/make_pictures.py
	JAX_PLATFORMS=cpu $(BIN)/python docs/make_cache_picture.py
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.plots

aot: $(AOT_VENV)/.aot
	JAX_PLATFORMS=cpu $(AOT_VENV)/bin/python -m pytest -n 2 --dist loadfile $(AOT_OPTIONS) $(AOT_TESTS)

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

# Half an hour on a GPU, with the installed Python: nothing is installed or downloaded. `make gpu-STAGE`
# runs one stage; `make gpu-list` lists the stages.
GPU_OUT ?= gpu-results

gpu:
	$(PYTHON) -m benchmarks.gpu --out $(GPU_OUT)

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
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.chat: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --editable ".[gguf]"
	touch $@

# Comparisons with transformers skip unless the extra "peers", which is large, is installed.
$(VENV)/.test: pyproject.toml | $(BIN)/python
	@echo "installing 2 GB of packages into $(VENV), once; this takes minutes"
	$(BIN)/python -m pip install --quiet --editable ".[test]" --group dev --group docs
	touch $@ $(VENV)/.demo

$(VENV)/.bench: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --editable ".[test,peers,benchmarks]"
	touch $@

$(AOT_VENV)/.aot: pyproject.toml | $(AOT_VENV)/bin/python
	$(AOT_VENV)/bin/python -m pip install --quiet --editable ".[test,aot]" "$(AOT_JAX)"
	touch $@
