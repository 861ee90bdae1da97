"""int8 weights: quantisation, loading, saving and accuracy."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax import LLM, SamplingParams
from paged_jax.engine.footprint import num_parameters, weight_bytes
from paged_jax.kernels.linear import Weight, linear
from paged_jax.kernels.native.layouts import InterleavedRows
from paged_jax.kernels.weight_formats import WeightFormat
from paged_jax.models import matrix_modules
from paged_jax.models.codecs.dtype_formats import DTYPE_FORMATS, quantise
from paged_jax.models.decoder import Decoder
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.loading import stored_matrices
from paged_jax.models.loading.huggingface import find_formats, load_weights
from paged_jax.models.loading.orbax import load_checkpoint, save_checkpoint
from paged_jax.models.loading.parameters import named_arrays
from paged_jax.models.matrix_formats import SCALE, SUFFIXES, MatrixFormats, is_matrix, matrix_name
from tests.support.processes import run_on_devices
from tests.support.random_model import random_llama
from tests.support.tiny_model import CONFIG, SIZES

TIED = dataclasses.replace(CONFIG, tie_word_embeddings=True, dtype="bfloat16")


def parameters(model) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in named_arrays(model).items()}


def assert_same(model, expected) -> None:
    got, expected = parameters(model), parameters(expected)
    assert got.keys() == expected.keys()
    for name, parameter in expected.items():
        np.testing.assert_array_equal(got[name], parameter, err_msg=name, strict=True)


@pytest.fixture(scope="module", params=[CONFIG, TIED], ids=["untied", "tied"])
def saved(request, tmp_path_factory):
    """Return a floating-point model, and its folder."""
    model = random_llama(request.param, dtype=request.param.dtype)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_quantise_is_exact_to_half_a_scale(as_array) -> None:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(3, 50, 40)).astype(np.float32) * np.logspace(-35, 30, 50)[:, None]
    w = w.astype(np.float32)
    w[0, 7], w[1, 3] = 0.0, np.float32(1e-44)
    values, scales = map(np.asarray, quantise(as_array(w))[:2])
    assert values.dtype == np.int8 and scales.dtype == np.float32 and scales.shape == (3, 50, 1)
    error = np.abs(values * scales.astype(np.float64) - w)
    assert (error <= 0.5001 * scales).all()
    large = np.abs(w).max(-1) > 1e-30
    assert (np.abs(values).max(-1)[large] == 127).all() and (values >= -127).all()


@pytest.mark.parametrize("backend", ["cpu", "xla"])
@pytest.mark.parametrize("num_rows", [1, 5, 70])
def test_linear_with_int8_matches_float64(backend, num_rows) -> None:
    rng = np.random.default_rng(0)
    values, scales, *_ = quantise(rng.normal(size=(2, 3, 4, 24)).astype(np.float32))
    x = rng.normal(size=(num_rows, 24)).astype(jnp.bfloat16).astype(np.float32)
    w = Weight(jnp.asarray(values), jnp.asarray(scales), dtype=jnp.dtype(jnp.bfloat16))
    got = jax.jit(functools.partial(linear, backend=backend))(x, w)
    exact = np.einsum("ni,abci->nabc", x.astype(np.float64), values * scales)
    assert got.shape == exact.shape
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_load_weights_quantises_to_int8(saved, scan_layers, monkeypatch) -> None:
    floats, folder = saved
    monkeypatch.setattr(stored_matrices, "READ_ELEMENTS", 100)
    model = load_weights(Decoder, folder, floats.config, dtype="int8", scan_layers=scan_layers)
    assert (model.float_dtype, model.weight_dtype) == (jnp.dtype(floats.config.dtype), jnp.int8)
    assert model.config == floats.config
    wide = load_weights(Decoder, folder, floats.config, scan_layers=scan_layers)
    expected = parameters(wide)
    for name, parameter in parameters(model).items():
        if name + SCALE in parameters(model):
            values, scales, *_ = quantise(expected.pop(name).astype(np.float32))
            np.testing.assert_array_equal(parameter, values, err_msg=name)
            np.testing.assert_array_equal(parameters(model)[name + SCALE], scales, err_msg=name)
        elif not name.endswith(SCALE):
            np.testing.assert_array_equal(parameter, expected.pop(name), strict=True)
    assert not expected
    assert {"embed_tokens" + SCALE, "lm_head" + SCALE} & parameters(model).keys() == {
        ("embed_tokens" if floats.config.tie_word_embeddings else "lm_head") + SCALE
    }
    weights = jax.tree.leaves(nnx.state(model))
    assert weight_bytes(floats.config, "int8") == sum(x.nbytes for x in weights)
    assert num_parameters(floats.config) == sum(x.size for x in parameters(wide).values())


@pytest.mark.parametrize("dtype", ["fp8", "int4", "int4-symmetric"])
def test_load_weights_quantises_to_each_dtype(saved, dtype) -> None:
    """Each matrix is rounded, the output head to int8, and norms stay floats."""
    floats, folder = saved
    config = floats.config
    model = load_weights(Decoder, folder, config, dtype=dtype)
    assert str(model.formats) == str(model.matrix_formats) == dtype.removesuffix("-symmetric")
    assert model.float_dtype == jnp.dtype(config.dtype) and model.config == config
    expected, got = parameters(floats), parameters(model)
    for name, w in expected.items():
        format = model.formats[name]
        if not is_matrix(name) or not format.is_quantised:
            np.testing.assert_array_equal(got.pop(name), w, err_msg=name, strict=True)
            continue
        arrays = quantise(w.astype(np.float32), format)
        for suffix, array in zip(("", *SUFFIXES), arrays, strict=True):
            if array is not None:
                stored = got.pop(name + suffix)
                np.testing.assert_array_equal(stored, np.asarray(array), err_msg=name + suffix)
    assert not got
    head = "embed_tokens" if config.tie_word_embeddings else "lm_head"
    assert model.formats[head].code == "int8"
    assert config.tie_word_embeddings or not model.formats["embed_tokens"].is_quantised
    num_bytes = sum(x.nbytes for x in parameters(model).values())
    assert weight_bytes(config, config.dtype, formats=model.formats) == num_bytes
    place = {"platform": "cpu", "num_devices": 1}
    assert find_formats(Decoder, folder, config, dtype=dtype, **place) == model.formats
    assert MatrixFormats.of_dtype(dtype, config) == model.formats


@pytest.mark.parametrize("model_type", ["gemma2", "phi3", "olmo2", "glm4"])
def test_load_weights_quantises_other_families(tmp_path, model_type) -> None:
    """Covers tensors with several parameters, and heads in another order."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = LlamaConfig.from_dict({"model_type": model_type, **sizes, **heads})
    random_llama(config).save_pretrained(tmp_path)
    floats, model = (load_weights(Decoder, tmp_path, config, dtype=d) for d in ("float32", "int8"))
    state = nnx.state(floats)
    for path, variable in nnx.to_flat_state(state):
        name = ".".join(map(str, path))
        if name + SCALE in parameters(model):
            values, scales, *_ = quantise(np.asarray(variable[...]))
            np.testing.assert_array_equal(parameters(model)[name], values, err_msg=name)
            np.testing.assert_array_equal(parameters(model)[name + SCALE], scales, err_msg=name)
            variable[...] = jnp.asarray(values * scales)
    nnx.update(floats, state)
    token_ids = np.arange(3, 15, dtype=np.int32)[None]
    forward = jax.jit(Decoder.__call__)
    want = forward(floats, token_ids)
    np.testing.assert_allclose(forward(model, token_ids), want, atol=1e-4 * float(want.std()))


@pytest.mark.parametrize(("dtype", "scan_layers"), [("int8", True), ("int4", False)])
def test_load_weights_prepares_matrices_for_a_backend(tmp_path, dtype, scan_layers) -> None:
    """Quantised matrices are interleaved if their number of rows is a multiple of 32.

    With int4, rows have two or three groups of inputs.
    """
    floats = random_llama(dataclasses.replace(CONFIG, hidden_size=64, intermediate_size=96))
    floats.save_pretrained(tmp_path)
    options = {"dtype": dtype, "scan_layers": scan_layers}
    plain = load_weights(Decoder, tmp_path, floats.config, **options)
    model = load_weights(Decoder, tmp_path, floats.config, backend=None, **options)
    assert model.formats.plain == plain.formats != model.formats
    kinds = set()
    for name, expected in parameters(plain).items():
        matrix = matrix_name(name)
        format = plain.formats[matrix]
        if is_matrix(matrix) and format.is_quantised:
            first = matrix.replace("layers.", "layers.0.", int(scan_layers))
            shape = parameters(floats)[first].shape
            is_interleaved = math.prod(shape[:-1]) % 32 == 0
            layout = InterleavedRows() if is_interleaved else None
            assert model.formats[matrix].layout == layout
            expected = expected if layout is None else layout.prepare(expected)
            kinds.add((matrix.rpartition(".")[2], is_interleaved))
        np.testing.assert_array_equal(parameters(model)[name], expected, err_msg=name, strict=True)
    assert {is_interleaved for _, is_interleaved in kinds} == {False, True}
    token_ids = np.arange(3, 15, dtype=np.int32)[None]
    want, got = (jax.jit(Decoder.__call__)(each, token_ids) for each in (plain, model))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("saved_stacked", [False, True])
@pytest.mark.parametrize("loaded_stacked", [False, True])
def test_load_checkpoint_reads_and_makes_int8(
    saved, tmp_path, saved_stacked, loaded_stacked
) -> None:
    floats, folder = saved
    config = floats.config
    expected = load_weights(Decoder, folder, config, dtype="int8", scan_layers=loaded_stacked)
    for saved_as, loaded_as in (("auto", "int8"), ("int8", "auto")):
        model = load_weights(Decoder, folder, config, dtype=saved_as, scan_layers=saved_stacked)
        save_checkpoint(model, tmp_path / saved_as)
        options = {"dtype": loaded_as, "scan_layers": loaded_stacked}
        loaded = load_checkpoint(Decoder, tmp_path / saved_as, config, **options)
        assert loaded.config == config
        assert_same(loaded, expected)
    floats = {"dtype": "float32", "scan_layers": loaded_stacked}
    kept = load_checkpoint(Decoder, tmp_path / "int8", config, **floats)
    assert kept.float_dtype == jnp.float32 and kept.weight_dtype == jnp.int8
    wide = load_checkpoint(Decoder, tmp_path / "int8", config, dequantise=True, **floats)
    for name, w in parameters(wide).items():
        if (scales := parameters(kept).get(name + SCALE)) is not None:
            np.testing.assert_array_equal(w, parameters(kept)[name] * scales, err_msg=name)


def test_int8_models_reject_training(saved) -> None:
    _, folder = saved
    model = Decoder.from_pretrained(folder, dtype="int8")
    with pytest.raises(TypeError, match="real- or complex-valued"):
        nnx.grad(lambda model: model(jnp.ones((1, 3), jnp.int32)).sum())(model)


def test_int8_model_is_close_to_float_model() -> None:
    """The bundled model on random tokens. Measured: 3.2769 (float32) and 3.2772 (int8) nats."""
    floats, model = (Decoder.from_pretrained(dtype=dtype) for dtype in ("float32", "int8"))
    token_ids = np.random.default_rng(0).integers(3, 1536, (4, 48)).astype(np.int32)
    score = jax.jit(Decoder.__call__)
    want, got = score(floats, token_ids), score(model, token_ids)
    losses = []
    for logits in (want, got):
        logprobs = jax.nn.log_softmax(logits[:, :-1])
        losses.append(-jnp.take_along_axis(logprobs, token_ids[:, 1:, None], -1).mean())
    assert abs(losses[1] - losses[0]) < 0.01
    assert 1e-4 < jnp.abs(got - want).mean() < 0.1 * jnp.std(want)


def test_int8_tokens_do_not_depend_on_the_batch(tiny_folder) -> None:
    llm = LLM(tiny_folder, dtype="int8", **SIZES)
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 9, 11], [7], [4, 4, 8, 20, 15], [9, 30])]
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3)
    together = [x.outputs[0].token_ids for x in llm.generate(prompts, params)]
    alone = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    assert together == alone and len({len(set(x)) for x in together}) > 1
    new = llm.load_params(tiny_folder)
    assert new.weight_dtype == jnp.int8
    llm.update_params(new)
    assert [x.outputs[0].token_ids for x in llm.generate(prompts, params)] == together


def test_load_weights_places_int8_on_several_devices(tiny_folder) -> None:
    """The scale of a row depends on all its columns, even on other devices."""
    program = """
        import sys
        import jax, numpy as np
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        from paged_jax.models.llama_config import LlamaConfig
        from paged_jax.models.decoder import Decoder
        from paged_jax.models.loading.huggingface import find_formats, load_weights
        from paged_jax.models.loading.parameters import named_arrays

        folder = sys.argv[1]
        config = LlamaConfig.from_file(folder)
        mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))

        def place(name, shape):
            last = "x" if shape[-1] % 2 == 0 else None  # scales have a single column
            return NamedSharding(mesh, P(*[None] * (len(shape) - 1), last))

        options = {"dtype": "int8", "scan_layers": False}
        whole = named_arrays(load_weights(Decoder, folder, config, **options))
        model = load_weights(Decoder, folder, config, sharding=place, **options)
        for name, parameter in named_arrays(model).items():
            assert parameter.sharding == place(name, parameter.shape), name
            np.testing.assert_array_equal(parameter, whole[name], err_msg=name)
    """
    run_on_devices(program, tiny_folder, num_devices=2)


@pytest.mark.parametrize(
    "format",
    [
        DTYPE_FORMATS["int8"],
        WeightFormat("int4", 16, "bfloat16", has_order=True),
        WeightFormat("uint4", 32, "float16", "float32"),
        WeightFormat("bfloat16"),
    ],
)
def test_only_shapes_gives_the_shapes_of_quantised_matrices(format) -> None:
    def make() -> nnx.Module:
        module = nnx.Module()
        matrix_modules.add_matrix(module, "w", jnp.ones((3, 2, 64), jnp.bfloat16), format)
        return module

    expected = jax.tree.map(lambda x: (x.shape, x.dtype), nnx.to_pure_dict(nnx.state(make())))
    with matrix_modules.only_shapes():
        shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(make)))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == expected
