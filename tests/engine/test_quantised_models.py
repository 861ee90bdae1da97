"""Quantised checkpoints in an engine: tokens, several devices, new weights, sleep, checkpoints.

The checkpoints were written by the tools that define their formats, see tests/data/quantised.
`ENGINES` and `MIXTURES` have the matrices of all formats, which a test checks. Engines of GGUF and
of GPTQ are part of the core, and all others are slow.
"""

import contextlib
import itertools
import json
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax import LLM, SamplingParams
from paged_jax.arguments import ArgumentError
from paged_jax.kernels.native import library
from paged_jax.kernels.native.library import LoadedKernel
from paged_jax.kernels.platforms import weight_store
from paged_jax.kernels.weight_formats import WeightArrays, WeightFormat, dequantise
from paged_jax.models.decoder import Decoder
from paged_jax.models.errors import WeightsError
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.loading import orbax
from paged_jax.models.loading.orbax import load_checkpoint, save_checkpoint
from paged_jax.models.loading.parameters import ModelSpec, named_arrays
from paged_jax.models.loading.pretrained import from_pretrained, read_config, read_formats
from paged_jax.models.matrix_formats import MatrixFormats, matrix_name
from tests.support import DATA
from tests.support.compiler import needs_vnni
from tests.support.processes import run_on_devices
from tests.support.random_model import random_llama

pytestmark = pytest.mark.usefixtures("padded_rows")

# Checkpoints with an engine of their own, each with other options. All other checkpoints have
# formats of these and of `MIXTURES`.
ENGINES = {
    "ct-fp8-block": {"preemption": "swap"},
    "gguf-k-quants": {"steps_per_dispatch": 1},
    "gguf-mixed": {"cascade_attention": False},
    "gguf-q4_0": {"num_speculative_tokens": 3},
    "gptq-v1-actorder": {"kv_dtype": "int8"},
}
# The checkpoint of each kind of matrix and, last, of the embeddings and of the output head.
KINDS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "rest")
MIXTURES = {
    ("bnb-int8", "bnb-nf4", "awq-gemm", "ct-mxfp4a16", "mlx-q4"): {"steps_per_dispatch": 3},
    ("ct-nvfp4a16", "ct-w4a16-actorder", "ct-w4a16-channel", "ct-w4a16-group-asym", "mlx-mxfp4"): {
        "kv_dtype": "int8",
        "preemption": "recompute",
    },
    ("ct-w8a16-pack", "fp8-block", "mlx-q8", "fp8-tensor", "ct-fp8-channel"): {
        "backend": "xla",
        "preemption": "swap",
    },
}
CORE = ("gguf-q4_0",)
SIZES = {"block_size": 4, "num_blocks": 22, "max_num_seqs": 4, "max_chunk": 16, "max_model_len": 64}
# The first prompts share their beginning, and the last repeats itself, so that drafts are accepted.
PROMPTS = [[5, *range(9, 26)], [5, *range(9, 19), 7, 8], [3, 4] * 6, [77, 1, 30]]
PAIR = SamplingParams(temperature=1, seed=3, n=2, max_tokens=14, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True)


def slow(*values: Any) -> Any:
    """Return the values of a parametrised test that is not part of the core."""
    return pytest.param(*values, marks=pytest.mark.slow)


def path_of(name):
    folder = DATA / "quantised" / name
    return folder / "model.gguf" if (folder / "model.gguf").exists() else folder


def loading(name, *, dequantise=False):
    # In this checkpoint, the gate is Q8_0 and up is BF16, and they form one matrix.
    if name == "gguf-mixed" and not dequantise:
        return pytest.warns(match="layers.0.gate_up_proj and others will be float32")
    return contextlib.nullcontext()


def load(name, *, dequantise=False, **options):
    """Return the model of a checkpoint, whose rows are in order."""
    path = path_of(name)
    options = {"dtype": "float32", "dequantise": dequantise, **options}
    with loading(name, dequantise=dequantise):
        return Decoder.from_pretrained(path, **options)


def load_engine(name, **options) -> LLM:
    """Return an engine that has loaded a checkpoint. Its kernels read interleaved rows."""
    with loading(name):
        llm = LLM(path_of(name), dtype="float32", **{**SIZES, **options})
    assert is_interleaved(llm) == ("backend" not in options)
    return llm


def is_interleaved(llm) -> bool:
    pairs = zip(llm.weights, llm.core.executor.weights.arrays, strict=True)
    return not all(np.array_equal(*pair) for pair in pairs)


def tokens_of(outputs) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def generate(llm, prompts=PROMPTS):
    """Return the tokens of greedy samples and of forks."""
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(2)]
    return tokens_of(llm.generate(inputs, [GREEDY, PAIR] * len(prompts), use_tqdm=False))


def combine(names) -> Decoder:
    """Return a model with each kind of matrix of another checkpoint, see `KINDS`."""
    *donors, rest = [load(name) for name in names]
    arrays, formats = named_arrays(rest), rest.formats
    others = {name: formats[name] for name in ("embed_tokens", "lm_head")}
    for kind, donor in zip(KINDS, donors, strict=False):
        name = f"layers.{kind}"
        arrays = {key: array for key, array in arrays.items() if matrix_name(key) != name}
        own = named_arrays(donor).items()
        arrays |= {key: array for key, array in own if matrix_name(key) == name}
        others[name] = donor.formats[name]
    formats = MatrixFormats(formats.default, tuple(sorted(others.items())))
    spec = ModelSpec(Decoder, rest.config, "float32", scan_layers=True, formats=formats)
    shapes = {name: (each.shape, each.dtype) for name, each in spec.parameters().items()}
    assert shapes == {name: (each.shape, each.dtype) for name, each in arrays.items()}
    return spec.build(lambda name, *_: arrays[name])


def generate_alone(llm: LLM) -> list[list[list[int]]]:
    """Return the tokens of each prompt without other requests or cached prefixes."""
    alone = []
    for prompt in PROMPTS:
        llm.reset_prefix_cache()
        alone += generate(llm, [prompt])
    return alone


def check_tokens(llm: LLM) -> list[list[list[int]]]:
    """Check that forks, prefix cache and preemption give the tokens of requests alone."""
    alone = generate_alone(llm)
    assert not llm.stats.num_preemptions
    llm.reset_prefix_cache()
    assert generate(llm) == alone
    assert llm.stats.num_preemptions and llm.stats.num_cached_tokens
    return alone


@pytest.mark.parametrize("name", [name if name in CORE else slow(name) for name in ENGINES])
def test_tokens_do_not_depend_on_other_requests(name) -> None:
    """Forks, prefix cache, preemption and drafts give the tokens of a request alone."""
    llm = load_engine(name, **ENGINES[name])
    check_tokens(llm)
    assert bool(llm.stats.num_accepted_tokens) == ("num_speculative_tokens" in ENGINES[name])


@pytest.mark.slow
def test_rows_in_order_give_the_tokens_of_interleaved_rows() -> None:
    model = load("gguf-q4_0")
    assert model.formats.is_quantised
    in_order = LLM(model, **SIZES)
    assert not is_interleaved(in_order)
    assert generate(in_order) == generate(load_engine("gguf-q4_0"))


@pytest.mark.slow
@pytest.mark.parametrize("names", MIXTURES, ids="-".join)
def test_tokens_of_mixed_formats_do_not_depend_on_other_requests(names) -> None:
    check_tokens(LLM(combine(names), **{**SIZES, **MIXTURES[names]}))


def test_engines_have_the_formats_of_all_checkpoints() -> None:
    def formats_of(name):
        path = path_of(name)
        with warnings.catch_warnings(action="ignore"):  # see `load`
            formats = read_formats(Decoder, path, read_config(path), dtype="float32")
        kinds = (f"layers.{layer}.{kind}" for layer in (0, 1) for kind in KINDS[:4])
        return {formats[each] for each in (*kinds, "embed_tokens", "lm_head")}

    tested = set().union(*map(formats_of, {*ENGINES, *itertools.chain(*MIXTURES)}))
    folders = [path.parent.name for path in DATA.glob("quantised/*/reference.npz")]
    quantised = [name for name in folders if name != "base-bf16"]
    assert len(quantised) > 25
    for name in quantised:
        assert formats_of(name) <= tested, name


@pytest.mark.slow
@needs_vnni
@pytest.mark.parametrize("name", ["gguf-q4_0", "mlx-q8"])
def test_int8_activations(name) -> None:
    """Tokens do not depend on other requests, and log-probabilities change little."""
    options = {"num_speculative_tokens": 2} if name == "gguf-q4_0" else {}
    options = {**SIZES, **options, "int8_activations": True}
    llm = LLM(path_of(name), dtype="float32", **options)
    check_tokens(llm)
    assert bool(llm.stats.num_drafts) == ("num_speculative_tokens" in options)

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompt = PROMPTS[0]
    [output] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    rows = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    scores = np.array([row[token].logprob for token, row in rows])
    model, token_ids = load(name), np.array([prompt], np.int32)
    logprobs = jax.jit(lambda model: jax.nn.log_softmax(model(token_ids)[0]))(model)
    exact = np.asarray(logprobs)[np.arange(len(prompt) - 1), prompt[1:]]
    difference = np.abs(exact - scores)
    assert 1e-3 < difference.max() / np.std(exact) < 0.1


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("gguf-q4_0", {"backend": "xla"}, "with the backend 'xla'"),
        ("fp8-tensor", {}, "for a model without matrices in int8, int4, uint4, e2m1, int5, uint5"),
        ("gguf-q4_0", {}, "on a processor without AVX512-VNNI"),
        ("gguf-q4_0", {}, "without C\\+\\+ kernels \\(there is no compiler\\)"),
    ],
)
def test_int8_activations_that_are_impossible(monkeypatch, name, options, words) -> None:
    flags = "avx2" if "processor" in words else "avx512_vnni"
    monkeypatch.setattr(library, "processor", lambda: flags)
    monkeypatch.setattr(library, "load", lambda kernel: LoadedKernel(None, "there is no compiler"))
    rule = f"Engine: int8_activations must be False {words}, got True."
    with pytest.raises(ArgumentError, match=rule):
        LLM(load(name), **SIZES, **options, int8_activations=True)


_ON_TWO_DEVICES = """
    import sys, warnings
    import numpy as np
    from paged_jax import LLM
    from paged_jax.models.decoder import Decoder
    from paged_jax.models.loading.parameters import named_arrays
    from paged_jax.runner import runner
    from tests.engine.test_quantised_models import (
        SIZES, as_floats, combine, generate, generate_alone, path_of
    )
    from tests.support.workload import full_batch

    runner.row_bucket = full_batch
    SIZES["num_blocks"] = 40
    has_vnni = sys.argv[1] == "True"

    MIXTURE = "ct-w8a16-pack", "ct-nvfp4a16", "fp8-block", "ct-fp8-channel", "ct-fp8-channel"

    def load(name, **options):
        return Decoder.from_pretrained(path_of(name), dtype="float32", **options)

    for name in (
        "gguf-q4_0", "gptq-v1-actorder", "ct-w4a16-group-asym", "fp8-block", "ct-nvfp4a16",
        "bnb-int8", "gguf-k-quants",
    ):
        path = path_of(name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            divided = LLM(path, **SIZES, dtype="float32", tensor_parallel_size=2)
        assert bool(caught) == (name == "gptq-v1-actorder"), [str(x.message) for x in caught]
        for each in caught:
            assert "reordered inputs cannot be divided over 2 devices" in str(each.message)
        held = [max(shard.data.nbytes for shard in x.addressable_shards) for x in divided.weights]
        assert sum(held) < 0.8 * sum(x.nbytes for x in divided.weights)
        if name in ("fp8-block", "ct-nvfp4a16", "bnb-int8", "gguf-k-quants"):
            # The engine of `MIXTURE` below has their formats, or int8 as in other checkpoints.
            arrays = named_arrays(divided.model)
            exact = named_arrays(load(name, dequantise=True, scan_layers=False))
            for kind in ("o_proj", "down_proj"):
                matrix = f"layers.{divided.config.num_hidden_layers - 1}.{kind}"
                got = as_floats(arrays, matrix, divided.model.formats[matrix])
                np.testing.assert_allclose(got, exact[matrix], rtol=1e-6, atol=1e-7)
            continue
        wanted = generate(LLM(load(name, dequantise=True), **SIZES))
        assert generate(divided) == wanted, name
        divided.sleep(1)
        divided.wake_up()
        divided.update_params(divided.load_params(path))
        assert generate(divided) == wanted, name

    # Loaded models are divided if their groups allow it.
    model = combine(MIXTURE)
    wanted = generate(LLM(model, **SIZES))
    assert generate(LLM(model, **SIZES, tensor_parallel_size=2)) == wanted
    try:
        LLM(load("gguf-q4_0"), **SIZES, tensor_parallel_size=2)
    except ValueError as error:
        text = "Engine: tensor_parallel_size must divide the 96 inputs of layers.down_proj, which "
        text += "are stored in units of 32, got 2. Load the model"
        assert str(error).startswith(text), error
    else:
        raise AssertionError("half of 96 inputs is not a multiple of 32")

    if has_vnni:
        options = {"tensor_parallel_size": 2, "int8_activations": True, "dtype": "float32"}
        divided = LLM(path_of("gguf-q4_0"), **SIZES, **options)
        alone = generate_alone(divided)
        divided.reset_prefix_cache()
        assert generate(divided) == alone, "int8 activations"
"""


@pytest.mark.slow
def test_tokens_on_two_devices_match_one_device() -> None:
    """The inputs of a part, 48 of 96, need smaller groups and wider values in most formats.

    The reference is a model with dequantised weights on one device. The models of all these
    checkpoints share its programs.
    """
    run_on_devices(_ON_TWO_DEVICES, not needs_vnni.args[0], num_devices=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["gptq-v1-actorder", slow("gguf-q4_0"), slow("gguf-k-quants"), slow("ct-fp8-block")],
)
def test_engine_quantises_new_weights_and_sleeps(name) -> None:
    """Floats of a trainer, weights of the same format, and weights of another folder."""
    model, floats = load(name), load(name, dequantise=True, scan_layers=False)
    assert not floats.formats.is_quantised
    options = ENGINES[name] if name == "gptq-v1-actorder" else {}
    llm = load_engine(name, **options)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(llm.model), nnx.state(model))
    wanted = generate(llm)
    llm.sleep(1)
    llm.wake_up()
    assert generate(llm) == wanted
    llm.update_params(floats)
    codes = [x.dtype for x in llm.weights]
    assert codes == [x.dtype for x in jax.tree.leaves(nnx.state(model))]
    given = named_arrays(llm.model)
    for kind in ("o_proj", "down_proj"):
        wide = jnp.stack([getattr(layer, kind)[...] for layer in floats.layers])
        format = model.formats[f"layers.{kind}"]
        got = as_floats(given, f"layers.{kind}", format)
        # A value of 4 bits is off by half a step of at most 1/7 of the largest, and 8 bits by 1/16.
        assert np.abs(got - wide).max() < 0.08 * np.abs(wide).max()
        assert np.abs(got - wide).mean() < 0.02 * np.abs(wide).max()
    llm.update_params(model)
    assert generate(llm) == wanted
    llm.update_params(llm.load_params(path_of(name)))
    assert generate(llm) == wanted


def as_floats(arrays, name, format: WeightFormat):
    parts = (arrays.get(name + suffix) for suffix in ("", "_scale", "_min", "_order"))
    layers = WeightArrays(*parts)
    return jax.vmap(lambda each: dequantise(each, format.code))(layers)


def test_update_params_refuses_another_format() -> None:
    llm = LLM(load("mlx-q4"), **SIZES)
    other = load("mlx-mxfp4")
    with pytest.raises(
        ValueError, match="must be quantised like the engine's model, or not quantised. Expected"
    ):
        llm.update_params(other)
    with pytest.raises(ValueError, match="params must have the parameter names"):
        llm.update_params(nnx.state(other))


@pytest.mark.parametrize(
    ("name", "stacked"),
    [
        ("gptq-v1-actorder", False),
        ("gguf-mixed", True),
        slow("gptq-v1-actorder", True),
        slow("mlx-q4", False),
        slow("gguf-k-quants", True),
        slow("fp8-block", False),
    ],
)
def test_checkpoints_keep_the_formats(tmp_path, name, stacked) -> None:
    model = load(name)
    save_checkpoint(model, tmp_path)
    loaded = load_checkpoint(Decoder, tmp_path, model.config, scan_layers=stacked)
    assert loaded.formats == model.formats and loaded.scan_layers == stacked
    direct = load(name, scan_layers=stacked)
    arrays = named_arrays(loaded)
    for key, array in named_arrays(direct).items():
        np.testing.assert_array_equal(arrays[key], array, err_msg=key, strict=True)
    wide = load_checkpoint(Decoder, tmp_path, model.config, scan_layers=stacked, dequantise=True)
    expected = named_arrays(load(name, scan_layers=stacked, dequantise=True))
    for key, array in named_arrays(wide).items():
        np.testing.assert_allclose(array, expected[key], rtol=1e-6, atol=1e-7, err_msg=key)


def test_checkpoints_in_compact_formats_are_widened_for_other_devices(
    tmp_path, monkeypatch
) -> None:
    """Widening keeps all elements, and layers with equal formats stay stacked."""
    model = load("gguf-k-quants", scan_layers=True)
    assert model.formats["layers.o_proj"].code == "uint5"
    save_checkpoint(model, tmp_path)
    monkeypatch.setattr(orbax, "weight_store", lambda platform: weight_store("tpu"))
    wide = load_checkpoint(Decoder, tmp_path, model.config, scan_layers=True)
    assert not any(each.is_compact for each in wide.formats.all_formats)
    assert wide.formats.differing == ()
    assert wide.formats["layers.o_proj"] == model.formats["layers.o_proj"].widened
    expected, got = named_arrays(model), named_arrays(wide)
    for kind in KINDS[:4]:
        name = f"layers.{kind}"
        np.testing.assert_array_equal(
            as_floats(got, name, wide.formats[name]), as_floats(expected, name, model.formats[name])
        )


def test_checkpoint_with_damaged_formats_is_refused(tmp_path) -> None:
    model = load("mlx-q4")
    save_checkpoint(model, tmp_path)
    path = tmp_path / "formats.json"
    formats = json.loads(path.read_text())
    for change in ({"default": None}, {"default": {"code": 3, "size": 4}}, {"others": []}):
        path.write_text(json.dumps({**formats, **change}))
        with pytest.raises(WeightsError, match="the checkpoint is damaged"):
            load_checkpoint(Decoder, tmp_path, model.config)
    path.write_text("{")
    with pytest.raises(WeightsError, match="the checkpoint is damaged"):
        load_checkpoint(Decoder, tmp_path, model.config)


@pytest.mark.slow
@pytest.mark.parametrize("code", ["int8", "e2m1"])
def test_models_with_experts_may_be_quantised(code, tmp_path) -> None:
    """The quantised model is compared with a model of the dequantised weights."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 80}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = LlamaConfig.from_dict({"model_type": "mixtral", **sizes, **heads, **experts})
    floats = random_llama(config)
    floats.save_pretrained(tmp_path)
    if code == "int8":
        model = Decoder.from_pretrained(tmp_path, dtype="int8", scan_layers=False)
    else:
        formats = MatrixFormats(WeightFormat(code, 16, "float32"))
        if sizes["intermediate_size"] % 32:  # the inputs of down_proj
            int8 = WeightFormat("int8", 16, "float32")
            formats = MatrixFormats(formats.default, (("layers.experts_down_proj", int8),))
        model = from_pretrained(Decoder, tmp_path, scan_layers=False, formats=formats)
    given, state = named_arrays(model), nnx.state(floats)
    num_changed = 0
    for path, variable in nnx.to_flat_state(state):
        name = ".".join(map(str, path))
        if f"{name}_scale" in given:
            parts = (given.get(name + suffix) for suffix in ("", "_scale"))
            w = dequantise(WeightArrays(*parts), model.formats[name].code)
            step = np.abs(np.asarray(variable[...])).max() / (100 if code == "int8" else 5)
            np.testing.assert_allclose(variable[...], w, rtol=0, atol=step)
            variable[...], num_changed = w, num_changed + ("experts" in name)
    assert num_changed == 2
    nnx.update(floats, state)
    token_ids = np.array([np.arange(3, 15), PROMPTS[2]], np.int32)
    want, got = (jax.jit(Decoder.__call__)(each, token_ids) for each in (floats, model))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * float(jnp.abs(want).max()))
    # The engine interleaves the rows of each expert.
    llm = LLM(tmp_path, dtype="int8", **SIZES) if code == "int8" else LLM(model, **SIZES)
    assert is_interleaved(llm) == (code == "int8")
    alone = []
    for prompt in PROMPTS[2:]:
        llm.reset_prefix_cache()
        alone += generate(llm, [prompt])
    assert alone[0][0][0] == jnp.argmax(got[1, -1])
    assert generate(llm, PROMPTS[2:]) == alone


@pytest.mark.slow
def test_scan_over_layers_with_different_formats(tmp_path) -> None:
    """Stacked layers equal separate layers, also in checkpoints and with new weights."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 80}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    floats = random_llama(LlamaConfig.from_dict({"model_type": "llama", **sizes, **heads}))
    floats.save_pretrained(tmp_path / "floats")
    int8, int4 = (
        WeightFormat("int8", 16, "float32"),
        WeightFormat("uint4", 32, "float16", "float16"),
    )
    others = ("layers.0.o_proj", WeightFormat("float32")), ("layers.1.down_proj", int4)
    formats = MatrixFormats(int8, others)
    assert formats.differing == ("down_proj", "o_proj")
    separate, stacked = (
        from_pretrained(Decoder, tmp_path / "floats", scan_layers=scan, formats=formats)
        for scan in (False, True)
    )
    arrays, own = named_arrays(separate), named_arrays(stacked)
    assert own["layers.qkv_proj"].shape[0] == 3 and "layers.1.down_proj_min" in own
    for name in own.keys() & arrays.keys():
        np.testing.assert_array_equal(own[name], arrays[name], err_msg=name, strict=True)
    token_ids = np.arange(3, 15, dtype=np.int32)[None]
    want, got = (jax.jit(Decoder.__call__)(each, token_ids) for each in (separate, stacked))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * float(jnp.abs(want).max()))

    save_checkpoint(stacked, tmp_path / "saved")
    for scan, expected in (False, arrays), (True, own):
        loaded = load_checkpoint(Decoder, tmp_path / "saved", stacked.config, scan_layers=scan)
        assert loaded.formats == formats
        for name, array in named_arrays(loaded).items():
            np.testing.assert_array_equal(array, expected[name], err_msg=name, strict=True)
    options = {"scan_layers": True, "dequantise": True}
    wide = named_arrays(load_checkpoint(Decoder, tmp_path / "saved", stacked.config, **options))
    down = wide["layers.down_proj"]
    for layer, format in enumerate((int8, int4, int8)):
        parts = (own.get(f"layers.{layer}.down_proj{each}") for each in ("", "_scale", "_min"))
        np.testing.assert_array_equal(down[layer], dequantise(WeightArrays(*parts), format.code))

    llm = LLM(stacked, **SIZES)
    tokens = generate(llm, PROMPTS[2:])
    for prompt, [sample] in zip(PROMPTS[2:], tokens[::2], strict=True):
        token_ids = np.zeros((1, 32), np.int32)
        token_ids[0, : len(prompt) + len(sample)] = prompt + sample
        best = np.argmax(jax.jit(Decoder.__call__)(separate, token_ids)[0], axis=-1)
        assert best[len(prompt) - 1 :][: len(sample)].tolist() == sample
    llm.update_params(random_llama(floats.config, scale=0.5))
    assert generate(llm, PROMPTS[2:]) != tokens
    llm.update_params(floats)
    assert generate(llm, PROMPTS[2:]) == tokens
