"""A small model with recurrent layers whose state depends on every token and on their order."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from paged_jax import Heads, LlamaConfig
from paged_jax.models.causal_attention import CausalAttention
from paged_jax.models.layer_attention import Attend, Carry, Recurrence
from paged_jax.models.layer_groups import KVShape, StateShape
from paged_jax.models.paged_model import PagedModel

V, E = 97, 16


class RecurrentConfig(LlamaConfig):
    """Three layers: a recurrent one, an attention layer, and another recurrent one."""

    @property
    def kv_shapes(self) -> tuple[KVShape | None, ...]:
        return None, KVShape(1, E, E), None

    @property
    def state_shapes(self) -> tuple[tuple[StateShape, ...], ...]:
        arrays = StateShape("sum", (2, E // 2), "float32"), StateShape("last", (E,), None)
        return arrays, (), arrays


def make_config(**fields: Any) -> RecurrentConfig:
    sizes = {"hidden_size": E, "num_attention_heads": 1, "num_key_value_heads": 1}
    sizes |= {"vocab_size": V, "intermediate_size": E, "num_hidden_layers": 3}
    return RecurrentConfig(**sizes | {"max_position_embeddings": 256} | fields)  # type: ignore[arg-type]


class RecurrentModel(PagedModel):
    """See the module. The layers compute one token at a time, so chunks change no bit."""

    def __init__(self, config: LlamaConfig, seed: int = 0):
        self.config = config
        rng = np.random.default_rng(seed)

        def param(*shape: int) -> nnx.Param:
            return nnx.Param(jnp.asarray(rng.standard_normal(shape), jnp.float32) / E**0.5)

        self.embed = nnx.Param(jnp.asarray(rng.standard_normal((V, E)), jnp.float32))
        self.head = param(E, V)
        self.first, self.last = param(E, E), param(E, E)
        self.qkv = param(E, 3 * E)
        # From a memory of a few tokens to one of the whole sequence.
        self.decay = nnx.Param(jnp.linspace(0.5, 0.99, E).reshape(2, E // 2))

    def hidden_states(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        attend: Attend[Carry],
        carry: Carry,
        backend: str | None = None,
    ) -> tuple[jax.Array, Carry]:
        x = self.embed[...][token_ids]
        for layer in range(3):
            if layer == 1:
                parts = jnp.split(x @ self.qkv[...], 3, axis=-1)
                q, k, v = (part.reshape(*x.shape[:-1], 1, E) for part in parts)
                out, carry = attend(layer, Heads(q, k, v), carry)
                out = out.reshape(x.shape)
            else:
                inputs = (x @ (self.last if layer else self.first)[...],)
                arrays = self.config.state_shapes[layer]
                out, carry = attend(layer, Recurrence(inputs, self.advance, arrays), carry)
            x = x + out
            x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        return x, carry

    def advance(
        self, inputs: tuple[jax.Array, ...], states: tuple[jax.Array, ...], num_tokens: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        [x] = inputs
        B, T, _ = x.shape

        def step(states: tuple[jax.Array, ...], each: tuple[jax.Array, jax.Array]):
            (total, last), (new, index) = states, each
            is_token = index < num_tokens
            mixed = new + 0.5 * jnp.roll(last.astype(jnp.float32), 1, axis=1)
            grown = self.decay[...][None] * total + mixed.reshape(B, 2, E // 2)
            total = jnp.where(is_token[:, None, None], grown, total)
            last = jnp.where(is_token[:, None], new.astype(last.dtype), last)
            return (total, last), jnp.sin(2 * total).reshape(B, E)

        steps = jnp.arange(T, dtype=jnp.int32)
        states, out = lax.scan(step, states, (jnp.swapaxes(x, 0, 1), steps))
        return jnp.swapaxes(out, 0, 1), states

    def logits(self, x: jax.Array, backend: str | None = None) -> jax.Array:
        return 3 * x @ self.head[...]

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """Return the logits of whole sequences ``[B, T]``, without a cache."""
        steps = jnp.arange(token_ids.shape[1], dtype=jnp.int32)
        positions = jnp.broadcast_to(steps, token_ids.shape)
        attend = CausalAttention(self.config)
        return self.logits(self.hidden_states(token_ids, positions, attend, ())[0])


@functools.cache
def make_model() -> RecurrentModel:
    return RecurrentModel(make_config())


def greedy_tokens(model: RecurrentModel, prompt: list[int], count: int) -> list[int]:
    """Return the most probable tokens after a prompt, from the model without a cache."""
    tokens, length = np.zeros(256, np.int32), len(prompt)
    tokens[:length] = prompt
    for end in range(length, length + count):
        logits = _forward(model, jnp.asarray(tokens)[None])[0, end - 1]
        tokens[end] = int(jnp.argmax(logits))
    return tokens[length : length + count].tolist()


def token_logprobs(model: RecurrentModel, tokens: list[int]) -> list[float]:
    """Return the log-probabilities of all tokens except the first."""
    padded = jnp.asarray(tokens + [0] * (256 - len(tokens)), jnp.int32)[None]
    logprobs = jax.nn.log_softmax(_forward(model, padded)[0])
    return [float(logprobs[place, token]) for place, token in enumerate(tokens[1:])]


@nnx.jit
def _forward(model: RecurrentModel, token_ids: jax.Array) -> jax.Array:
    return model(token_ids)
