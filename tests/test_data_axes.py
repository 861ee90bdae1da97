"""Tests of data parallelism: rows on several devices are those of a single device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from paged_jax import rollouts
from paged_jax.data_axes import map_rows
from paged_jax.models.decoder import Decoder
from paged_jax.rollouts import Rollout, rollout
from paged_jax.sampling.sample import Draws
from tests.support.random_model import random_llama
from tests.support.tiny_model import BOS, CONFIG

pytest_plugins = ["tests.support.devices"]

DIVIDED, WHOLE = PartitionSpec("data"), PartitionSpec()
Auto, Explicit = AxisType.Auto, AxisType.Explicit


def number_rows(offset: jax.Array, rows: jax.Array, first_row: jax.Array) -> jax.Array:
    """Return the input and the index of each row, and the number of rows on its device."""
    count = rows.shape[0]
    columns = rows + offset, first_row + jnp.arange(count), jnp.full(count, count)
    return jnp.stack(columns, axis=1)


@pytest.mark.parametrize(
    ("shape", "types"),
    [((2, 2), (Auto, Auto)), ((4, 1), (Explicit, Explicit)), ((2, 2), (Explicit, Auto))],
)
def test_map_rows_divides_and_counts_rows(shape, types, devices) -> None:
    axes = ("fsdp", "data")
    mesh = jax.make_mesh(shape, axes, axis_types=types, devices=devices[: np.prod(shape)])
    rows = jax.device_put(jnp.arange(8), NamedSharding(mesh, PartitionSpec(axes)))
    offset = jax.device_put(jnp.int32(10), NamedSharding(mesh, WHOLE))
    for names in (axes, "data", ()):
        divide = functools.partial(map_rows, "f", number_rows, axis_name=names)
        count = 8 // np.prod([mesh.shape[name] for name in axes if name in names])
        expected = np.stack([np.arange(8) + 10, np.arange(8), np.full(8, count)], axis=1)
        np.testing.assert_array_equal(jax.jit(divide)(offset, rows), expected)
    np.testing.assert_array_equal(divide(offset, rows), expected)
    # The type of an array names its explicit axes, so they need not be given.
    divide = functools.partial(map_rows, "f", number_rows, axis_name=None)
    explicit = [size for size, kind in zip(shape, types, strict=True) if kind == Explicit]
    counts = jax.jit(divide)(offset, rows)[:, 2]
    assert set(counts.tolist()) == {8 // int(np.prod(explicit))}


def test_map_rows_counts_rows_inside_shard_map(devices) -> None:
    mesh = jax.make_mesh((2, 2), ("model", "data"), axis_types=(Auto,) * 2, devices=devices[:4])
    for names, firsts in (("data", (0, 4)), ((), (0, 0))):
        divide = functools.partial(map_rows, "f", number_rows, axis_name=names)
        out = jax.shard_map(
            divide, mesh=mesh, in_specs=(WHOLE, DIVIDED), out_specs=DIVIDED, check_vma=False
        )(jnp.int32(0), jnp.arange(8))
        assert out[:, 1].tolist() == [first + row for first in firsts for row in range(4)]


def test_map_rows_rejects_axes_that_do_not_fit() -> None:
    mesh = jax.make_mesh((1, 1), ("model", "data"), axis_types=(Auto,) * 2)

    def inside(names):
        divide = functools.partial(map_rows, "f", number_rows, axis_name=names)
        jax.eval_shape(jax.shard_map(divide, mesh=mesh, in_specs=WHOLE, out_specs=WHOLE), 0, [1])

    rows = jnp.arange(3)
    for call, message in (
        (lambda: inside(None), r"f: axis_name must be given inside jax.shard_map .*Pass \(\) if"),
        (lambda: inside("x"), r"axes of jax.shard_map, \('model', 'data'\), got 'x'. Name the"),
        (lambda: map_rows("f", number_rows, 0, rows, "x"), r"\(\), got 'x'. Put the prompts or"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_map_rows_rejects_rows_that_cannot_be_divided(devices) -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(Auto,), devices=devices[:2])
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="must be a multiple of 2, .* got 3"):
        map_rows("f", number_rows, 0, jnp.arange(3), "data")


# Rollouts: equal prompts, whose samples must all differ

PROMPTS, NUM_TOKENS = np.tile(np.array([BOS, 5, 6], np.int32), (4, 1)), np.full(4, 3, np.int32)
TEMPERATURES = np.array([1.0, 1.1, 0.9, 1.2], np.float32)


def draw(model: Decoder, prompts, num_tokens, temperature, axis_name=None) -> Rollout:
    sizes = {"max_tokens": 4, "num_samples": 2, "block_size": 4, "stop_token_ids": ()}
    way = {"temperature": temperature, "seed": 9, "axis_name": axis_name}
    return rollout(model, prompts, num_tokens, **sizes, **way)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return random_llama(dataclasses.replace(CONFIG, num_hidden_layers=1), scale=0.4)


@pytest.fixture(scope="module")
def alone(model) -> Rollout:
    """Return the samples of a single device."""
    drawn = jax.jit(draw)(model, PROMPTS, NUM_TOKENS, TEMPERATURES)
    assert len(set(map(tuple, drawn.token_ids.tolist()))) == 8
    return drawn


def check_equal(drawn: Rollout, alone: Rollout) -> None:
    np.testing.assert_array_equal(drawn.token_ids, alone.token_ids)
    np.testing.assert_allclose(drawn.logprobs, alone.logprobs, atol=1e-5)
    assert isinstance(drawn.token_ids.sharding, NamedSharding)
    assert drawn.token_ids.sharding.spec[0] == "data"


def test_rows_have_the_random_keys_of_one_device(model, monkeypatch, devices) -> None:
    """Without prefill and decode steps, the program compiles quickly."""

    def keys_of_rows(model, state, *_) -> tuple[Draws, jax.Array]:
        words = state.sampling.keys.T
        return Draws(words, words, *[words] * 3), words[0]

    monkeypatch.setattr(rollouts, "_decode", keys_of_rows)
    arguments = model, PROMPTS[:, :1], np.ones_like(NUM_TOKENS), TEMPERATURES
    keys = jax.jit(draw)(*arguments).token_ids
    assert len(set(map(tuple, keys.tolist()))) == 8
    mesh = jax.make_mesh((4,), ("data",), axis_types=(Auto,), devices=devices[:4])
    specs = {"in_specs": (WHOLE, *(DIVIDED,) * 3), "out_specs": DIVIDED}
    each = functools.partial(draw, axis_name="data")
    divided = jax.shard_map(each, mesh=mesh, **specs, check_vma=False)
    np.testing.assert_array_equal(jax.jit(divided)(*arguments).token_ids, keys)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 4])
def test_rollout_in_shard_map_draws_the_samples_of_one_device(
    num_devices, model, alone, devices
) -> None:
    mesh = jax.make_mesh(
        (num_devices,), ("data",), axis_types=(Auto,), devices=devices[:num_devices]
    )
    specs = {"in_specs": (WHOLE, *(DIVIDED,) * 3), "out_specs": DIVIDED}
    each = functools.partial(draw, axis_name="data")
    divided = jax.shard_map(each, mesh=mesh, **specs, check_vma=False)
    check_equal(jax.jit(divided)(model, PROMPTS, NUM_TOKENS, TEMPERATURES), alone)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize(("kind", "axis_name"), [(Auto, "data"), (Explicit, None)])
def test_rollout_divides_prompts_over_a_mesh(
    kind, axis_name, num_devices, model, alone, devices
) -> None:
    """The weights are divided too, as in fully sharded data parallelism."""
    mesh = jax.make_mesh(
        (num_devices,), ("data",), axis_types=(kind,), devices=devices[:num_devices]
    )
    divided, whole = NamedSharding(mesh, DIVIDED), NamedSharding(mesh, WHOLE)
    weights = jax.tree.map(
        lambda x: jax.device_put(x, divided if x.shape[0] % num_devices == 0 else whole), model
    )
    rows = jax.device_put((PROMPTS, NUM_TOKENS), divided)
    each = functools.partial(draw, axis_name=axis_name)
    check_equal(jax.jit(each)(weights, *rows, TEMPERATURES), alone)
