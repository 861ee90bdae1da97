"""Several residual streams per token (AltUp, arXiv 2301.13310), as in Gemma 3n.

A layer first predicts its effect on all streams by linear combinations of them. It then computes
attention and MLP for one stream, the active stream, and corrects all streams by the error of the
prediction::

    streams [n, E] --> predicted [n, E] --> layer on the active stream --> output [E]
                              |                                              |
                              +--> corrected = predicted + c (output - predicted active stream)

The factors c and the coefficients of the prediction depend on the active stream.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from paged_jax.kernels.exact import rounded
from paged_jax.kernels.linear import Weight, grouped_linear, linear
from paged_jax.kernels.norm_rope import expand, mean_square
from paged_jax.kernels.op import is_exact
from paged_jax.models.parts.norm import Norm
from paged_jax.models.parts.part import LayerCall, Normal, Parameter, Part, ones, vector
from paged_jax.models.parts.residual import PerLayerEmbedding

# `_with_mean_square` divides by the mean square of a stream, or by this number if it is larger.
_MIN_MEAN_SQUARE = 1e-5


class ResidualStreams(NamedTuple):
    """Number and options of a token's residual streams, see `Streams`.

    Attributes:
      count: number of streams (n), at least 2.
      active: index of the stream on which attention and MLP run.
      scales_active: whether the active stream is multiplied by the parameter ``stream_factor``
        before it gates the layer's token embeddings, see `Streams`.
    """

    count: int
    active: int = 0
    scales_active: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Streams(Part):
    """A step that runs other steps on the active stream, and corrects all streams ``[..., n, E]``.

    Parameters::

        stream_norm     [E]        norm of the active stream
        stream_router   [n, E]     projection of the active stream to n router outputs
        stream_predict  [n * n, n] projection of the router outputs to the coefficients of the
                                   prediction
        stream_correct  [n, n]     projection of the router outputs to the factors of the correction
        stream_factor   [E]        factor of the active stream before it gates the layer's token
                                   embeddings

    Attributes:
      streams: number and options of the streams.
      steps: steps on the active stream.
      norm: norm of the active stream.
      embedding: the layer's token embeddings, which are added to all streams except the first; None
        for none.
      deviation: standard deviation of initial weights.
    """

    streams: ResidualStreams
    steps: tuple[Part, ...]
    norm: Norm
    embedding: PerLayerEmbedding | None = None
    deviation: float = 0.02

    def __post_init__(self) -> None:
        count, active, _ = self.streams
        if not (count > 1 and 0 <= active < count):
            raise ValueError(
                "Streams: streams.count must be at least 2, and streams.active must be less than "
                f"count, got count {count} and active {active}."
            )

    tensor_names = {
        "stream_norm": "altup.router_norm.weight",
        "stream_router": "altup.modality_router.weight",
        "stream_predict": "altup.prediction_coefs.weight",
        "stream_correct": "altup.correction_coefs.weight",
        "stream_factor": "altup.correct_output_scale",
    }
    can_stack = False

    @property
    def inner(self) -> tuple[Part, ...]:
        """The steps, and the embedding."""
        return self.steps if self.embedding is None else (*self.steps, self.embedding)

    def map_inner(self, function: Callable[[Part], Part]) -> Self:
        """Replace each step."""
        return dataclasses.replace(self, steps=tuple(map(function, self.steps)))

    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        """Return the parameters by name."""
        E, n, normal = hidden_size, self.streams.count, Normal(self.deviation)
        return {
            **self.norm.parameters("stream_norm", E),
            "stream_router": vector(n, E, initial=normal),
            "stream_predict": vector(n * n, n, initial=normal),
            "stream_correct": vector(n, n, initial=normal),
            "stream_factor": vector(E, initial=ones),
        }

    def __call__(self, x: jax.Array, call: LayerCall, carry: Any) -> tuple[jax.Array, Any]:
        """Run the steps on the active stream of ``x [..., n, E]``, see `Part.__call__`."""
        predicted = self._predict(x, call)
        active = predicted[..., self.streams.active, :]
        for step in self.steps:
            active, carry = step(active, call, carry)
        return self._embed(self._correct(predicted, active, call), call), carry

    def _predict(self, x: jax.Array, call: LayerCall) -> jax.Array:
        """Predict the streams after a layer from the streams ``x [..., n, E]`` before it."""
        n = x.shape[-2]
        modes = self._modes(x[..., self.streams.active, :], call)
        factors = _multiply(modes, call.vector("stream_predict"), call.backend)
        factors = factors.reshape(*modes.shape[:-1], n, n)
        if is_exact(call.backend):
            columns = jnp.moveaxis(factors, -1, 0)[..., None] * jnp.moveaxis(x, -2, 0)[..., None, :]
            return x + functools.reduce(operator.add, rounded(columns, call.backend))
        return x + jnp.matmul(factors, x, precision="highest")

    def _correct(self, predicted: jax.Array, out: jax.Array, call: LayerCall) -> jax.Array:
        """Correct the predicted streams by the active stream after attention and MLP.

        `predicted` is the result of `_predict`, and `out` is float32 ``[..., E]``.
        """
        modes = self._modes(out, call)
        factors = 1 + _multiply(modes, call.vector("stream_correct"), call.backend)
        error = out - predicted[..., self.streams.active, :]
        return predicted + rounded(factors[..., None] * error[..., None, :], call.backend)

    def _embed(self, x: jax.Array, call: LayerCall) -> jax.Array:
        """Add the gated token embeddings to all streams ``[..., n, E]`` except the first."""
        if self.embedding is None:
            return x
        active = x[..., self.streams.active, :]
        if self.streams.scales_active:
            active = active * expand(call.vector("stream_factor"), active.ndim)
        return x.at[..., 1:, :].add(self.embedding.embed(active, call)[..., None, :])

    def _modes(self, x: jax.Array, call: LayerCall) -> jax.Array:
        """Return a stream's router outputs, float32 ``[..., n]`` in [-1, 1]."""
        normed = self.norm.apply("stream_norm", x, call.vector, call.backend) / x.shape[-1]
        return jnp.tanh(_multiply(normed, call.vector("stream_router"), call.backend))


def split_streams(x: jax.Array, proj: Weight, backend: str | None) -> jax.Array:
    """Return the first layer's input streams ``[..., n, E]`` for embeddings ``x [..., E]``.

    The embeddings are the first stream. ``proj [n - 1, E, E]`` projects them to the other streams,
    which are scaled to the same mean square.
    """
    streams = linear(x, proj, backend=backend)
    streams = _with_mean_square(streams, mean_square(x, backend=backend)[..., None, :], backend)
    return jnp.concatenate([x[..., None, :], streams], axis=-2)


def merge_streams(x: jax.Array, proj: Weight, backend: str | None) -> jax.Array:
    """Merge the streams after the last layer into hidden states ``[..., E]``.

    All streams but the first are projected by ``proj [n - 1, E, E]``, and scaled so that they have
    the same mean square as the first stream. The result is the mean of all streams.
    ``x [..., n, E]`` is float32.
    """
    *rows, n, E = x.shape
    by_stream = jnp.moveaxis(x.reshape(-1, n, E)[:, 1:], 1, 0)
    num_rows = by_stream.shape[1]
    sizes = jnp.full(n - 1, num_rows, jnp.int32)
    streams = grouped_linear(by_stream.reshape(-1, E), proj, sizes, backend=backend)
    streams = jnp.moveaxis(streams.reshape(n - 1, num_rows, E), 0, 1).reshape(*rows, n - 1, E)
    first = x[..., :1, :]
    streams = _with_mean_square(streams, mean_square(first, backend=backend), backend)
    return (first[..., 0, :] + jnp.sum(streams, axis=-2)) / n


def _multiply(x: jax.Array, w: jax.Array, backend: str | None) -> jax.Array:
    if is_exact(backend):
        return linear(x, w.astype(jnp.float32), backend=backend)
    return jnp.matmul(x, w.astype(jnp.float32).T, precision="highest")


def _with_mean_square(x: jax.Array, target: jax.Array, backend: str | None) -> jax.Array:
    """Scale ``x [..., n, E]`` so that the mean square of each vector is `target`."""
    mean = mean_square(x, num_heads=x.shape[-2], backend=backend)
    return rounded(x * jnp.sqrt(target / jnp.maximum(mean, _MIN_MEAN_SQUARE)), backend)
