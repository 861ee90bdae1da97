"""`PagedRollout`: a rollout worker for the learners of Tunix. Needs the extra ``tunix``.

    ClusterConfig(rollout_engine=functools.partial(PagedRollout, max_num_seqs=64), ...)

This line is the only change in a Tunix program. The engine has its own copy of the weights, in a
different layout. After each training step, Tunix calls `PagedRollout.update_params`, which copies
the trainer's weights into the engine.
"""

import functools
import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.generate import tokenizer_adapter  # pyright: ignore[reportMissingImports]
from tunix.rl import common  # pyright: ignore[reportMissingImports]
from tunix.rl.rollout import base_rollout  # pyright: ignore[reportMissingImports]

from paged_jax.integrations.forwards import ForwardComparison, compare_forwards
from paged_jax.llm import LLM
from paged_jax.models.config import ModelConfig
from paged_jax.models.decoder import Decoder
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.loading.conversion import NameMap
from paged_jax.sampling.params import SamplingParams
from paged_jax.training import log_probs

# Maps parameter names of Tunix's Llama 3, Qwen 2 and Qwen 3 to Hugging Face names. If the order of
# dimensions differs, the name comes with a permutation of the dimensions of Tunix's array. Tunix
# stores matrices as [in, out], and attention matrices with a separate dimension for heads.
MAPPING: NameMap = {
    "embedder.input_embedding": "model.embed_tokens.weight",
    "final_norm.w": "model.norm.weight",
    "lm_head.w": ("lm_head.weight", (1, 0)),
    "layers.*.input_layernorm.w": "model.layers.*.input_layernorm.weight",
    "layers.*.post_attention_layernorm.w": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.attn.q_proj.w": ("model.layers.*.self_attn.q_proj.weight", (1, 2, 0)),
    "layers.*.attn.k_proj.w": ("model.layers.*.self_attn.k_proj.weight", (1, 2, 0)),
    "layers.*.attn.v_proj.w": ("model.layers.*.self_attn.v_proj.weight", (1, 2, 0)),
    "layers.*.attn.o_proj.w": ("model.layers.*.self_attn.o_proj.weight", (2, 0, 1)),
    "layers.*.attn.q_bias": "model.layers.*.self_attn.q_proj.bias",
    "layers.*.attn.k_bias": "model.layers.*.self_attn.k_proj.bias",
    "layers.*.attn.v_bias": "model.layers.*.self_attn.v_proj.bias",
    "layers.*.attn.q_norm.w": "model.layers.*.self_attn.q_norm.weight",
    "layers.*.attn.k_norm.w": "model.layers.*.self_attn.k_norm.weight",
    "layers.*.mlp.gate_proj.kernel": ("model.layers.*.mlp.gate_proj.weight", (1, 0)),
    "layers.*.mlp.up_proj.kernel": ("model.layers.*.mlp.up_proj.weight", (1, 0)),
    "layers.*.mlp.down_proj.kernel": ("model.layers.*.mlp.down_proj.weight", (1, 0)),
}

# Fields of `LlamaConfig` for the models of each package in `tunix.models`.
_FAMILIES: Mapping[str, dict[str, Any]] = {
    "llama3": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2", "qkv_bias": True},
    "qwen3": {"model_type": "qwen3", "qk_norm": True},
}
# Number of tokens per sequence in the comparison of the trainer's and the engine's forward passes.
# This is enough to detect differences in attention and in position embeddings.
_NUM_COMPARED = 16


def config_of(actor: nnx.Module, **changes: Any) -> LlamaConfig:
    """Return the `LlamaConfig` that describes a Tunix model.

    Args:
      actor: a Llama 3, Qwen 2 or Qwen 3 model of Tunix, without experts.
      **changes: fields of `LlamaConfig`, which override the values of the Tunix model.

    Raises:
      ValueError: the model is not supported.
    """
    module = type(actor).__module__
    family = module.removeprefix("tunix.models.").split(".")[0]
    config: Any = getattr(actor, "config", None)
    if family not in _FAMILIES or getattr(config, "num_experts", None):
        raise ValueError(
            "PagedRollout: rollout_actor must be a dense Llama 3, Qwen 2 or Qwen 3 model of Tunix, "
            f"got {type(actor).__name__} of {module}. For other models, pass config= and mapping=."
        )
    is_tied = getattr(config, "weight_tying", False) or getattr(config, "use_tied_embedding", False)
    own = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": float(config.rope_theta),
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": is_tied,
        "dtype": jax.tree.leaves(nnx.state(actor, nnx.Param))[0].dtype.name,
    }
    return LlamaConfig(**own | _FAMILIES[family] | changes)


class PagedRollout(base_rollout.BaseRollout):
    """Tunix rollout worker with an engine: ``ClusterConfig(rollout_engine=PagedRollout)``.

    The constructor compares the forward passes of the trainer and the engine with
    `compare_forwards`. If they differ because the trainer ignores one value of its config, the
    engine uses the trainer's value too, and a warning is issued. Any other difference raises an
    error. (In Tunix 0.1.7, Llama 3 and Qwen 3 always use a ``rope_theta`` of 1,000,000, so Tunix
    computes Llama 3 checkpoints incorrectly.)

    The weights and the cache are divided among all devices of `mesh`, see `LLM`. LoRA adapters and
    ``offload_to_cpu=True`` are not supported.

    Args:
      rollout_actor: the model of the trainer.
      tokenizer: the tokenizer of the trainer.
      mesh: the devices for the engine.
      rollout_config: Tunix's config; its maximum lengths, temperature and seed are used.
      config: configuration of the model; by default ``config_of(rollout_actor)``.
      mapping: maps names of the trainer's parameters, see `LLM.update_params`.
      tolerance: largest allowed difference of log-probabilities between the forward passes, in
        nats. The default is 1e-3 for float32 weights and 0.05 for others.
      **engine_options: options of `LLM`, such as `max_num_seqs` and `num_blocks`.

    Attributes:
      llm: the engine.
      comparison: the result of `compare_forwards`.

    Raises:
      ValueError: the model is not supported, or the forward passes differ.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: jax.sharding.Mesh,
        rollout_config: base_rollout.RolloutConfig,
        *,
        config: LlamaConfig | None = None,
        mapping: NameMap = MAPPING,
        tolerance: float | None = None,
        **engine_options: Any,
    ):
        is_adapter = isinstance(tokenizer, tokenizer_adapter.TokenizerAdapter)
        self._tokenizer = tokenizer if is_adapter else tokenizer_adapter.TokenizerAdapter(tokenizer)
        self._mapping = mapping
        self._temperature = rollout_config.temperature
        num_tokens = rollout_config.max_prompt_length + rollout_config.max_tokens_to_generate
        max_model_len = max(rollout_config.kv_cache_size, num_tokens)
        options = {"max_model_len": max_model_len, "seed": _seed_as_int(rollout_config.seed)}
        options |= engine_options
        if config is None:
            config = config_of(
                rollout_actor,
                max_position_embeddings=max(options["max_model_len"], _NUM_COMPARED),
                eos_token_ids=(self.eos_id(),),
            )
        self.llm = _make_engine(config, rollout_actor, mapping, mesh, options)
        if tolerance is None:
            tolerance = 1e-3 if config.dtype == "float32" else 0.05
        self.comparison = self._compare(rollout_actor, tolerance)
        if self.comparison.is_close:
            return
        if self.comparison.config is None:
            raise ValueError(
                "PagedRollout: the engine must compute the same log-probabilities as the trainer, "
                f"got a difference of {self.comparison.largest:.3g} nats. "
                f"{self.comparison.explanation}"
            )
        warnings.warn(
            f"PagedRollout: {self.comparison.explanation} The engine uses the trainer's value.",
            stacklevel=2,
        )
        del self.llm  # free the memory of the first engine before the second one is built
        self.llm = _make_engine(self.comparison.config, rollout_actor, mapping, mesh, options)

    def _compare(self, actor: nnx.Module, tolerance: float) -> ForwardComparison:
        special = {self.pad_id(), self.eos_id()}
        plain = [i for i in range(self.llm.config.vocab_size) if i not in special]
        drawn = np.random.default_rng(0).choice(plain, (2, _NUM_COMPARED))

        def logprobs_of(token_ids: jax.Array) -> jax.Array:
            return common.compute_per_token_logps(
                *nnx.split(actor),
                prompt_tokens=token_ids[:, :1],
                completion_tokens=token_ids[:, 1:],
                pad_id=self.pad_id(),
                eos_id=self.eos_id(),
            )

        tokens = jnp.asarray(drawn, jnp.int32)
        model = cast(Decoder, self.llm.model)
        return compare_forwards(model, logprobs_of, tokens, tolerance=tolerance)

    def generate(
        self, prompts: list[str], rollout_config: base_rollout.RolloutConfig, **kwargs: Any
    ) -> base_rollout.RolloutOutput:
        """Generate a sample for each prompt. Equal consecutive prompts share cache blocks.

        With ``return_logprobs``, log-probabilities are computed as in the trainer's loss: logits
        are divided by the sampling temperature, and top_p and top_k are not applied.
        """
        counts = [len(list(group)) for _, group in itertools.groupby(prompts)]
        num_samples = counts[0] if len(set(counts)) == 1 else 1
        ids = [self._encode(prompt) for prompt in prompts[::num_samples]]
        padded, lengths = _padded(ids, rollout_config.max_prompt_length, self.pad_id())
        params = self._params(rollout_config, num_samples)
        drawn = self.llm.rollout(padded, lengths, params)
        left_padded = np.repeat(_left_padded(padded, lengths), num_samples, axis=0)
        logprobs = drawn.logprobs
        if rollout_config.return_logprobs and rollout_config.temperature not in (0.0, 1.0):
            logprobs = self._logps(left_padded, drawn.token_ids, rollout_config.temperature)
        rows = [np.asarray(x)[:n] for x, n in zip(drawn.token_ids, drawn.num_drawn, strict=True)]
        return base_rollout.RolloutOutput(
            text=[self._tokenizer.decode(row.tolist()) for row in rows],
            logits=None,
            tokens=rows,
            left_padded_prompt_tokens=left_padded,
            logprobs=[np.asarray(x)[: len(row)] for x, row in zip(logprobs, rows, strict=True)],
        )

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array
    ) -> jax.Array:
        """Return the log-probability of each token of the completions, f32 [B, N].

        They are computed with the engine's weights and the sampling temperature.

        Args:
          prompt_tokens: i32 [B, T], padded on the left.
          completion_tokens: i32 [B, N], padded on the right.
        """
        return self._logps(prompt_tokens, completion_tokens, self._temperature)

    def _logps(self, prompt_tokens: Any, completion_tokens: Any, temperature: float) -> jax.Array:
        arrays = (jnp.asarray(x) for x in (prompt_tokens, completion_tokens))
        scale = 1.0 if temperature == 0 else temperature
        return _completion_logprobs(self.llm.model, *arrays, self.pad_id(), scale)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Copy the trainer's weights into the engine.

        Raises:
          NotImplementedError: the weights are adapters (LoRA).
        """
        if filter_types is not None and nnx.LoRAParam in tuple(filter_types):
            raise NotImplementedError(
                "PagedRollout: the weights must not be LoRA adapters. Train without LoRA."
            )
        self.llm.update_params(params, mapping=self._mapping)

    def pad_id(self) -> int:
        """Return the id of the padding token, for prompts and completions."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Return the id of the end-of-sequence token."""
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """Return None, so that Tunix calls `update_params` instead of sharing its weights."""
        return None

    def _encode(self, text: str) -> list[int]:
        bos = [self._tokenizer.bos_id()] if self._tokenizer.bos_id() else []
        return self._tokenizer.dedup_bos_ids([*bos, *self._tokenizer.encode(text)])

    def _params(self, config: base_rollout.RolloutConfig, num_samples: int) -> SamplingParams:
        # Tunix treats all tokens with the id of the padding token as padding. So if this token is
        # generated, it must end the completion.
        stop_token_ids = {*(config.eos_tokens or [self.eos_id()]), self.pad_id()}
        return SamplingParams(
            n=num_samples,
            temperature=config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=config.top_k or 0,
            max_tokens=config.max_tokens_to_generate,
            ignore_eos=True,
            stop_token_ids=sorted(stop_token_ids),
        )


def _make_engine(
    config: ModelConfig,
    actor: nnx.Module,
    mapping: NameMap,
    mesh: jax.sharding.Mesh,
    options: dict[str, Any],
) -> LLM:
    """Build an engine with the config `config` and the weights of the trainer's model `actor`."""
    device = mesh.devices.flat[0]
    if mesh.size > 1:
        options = {"mesh": mesh, **options}
        # Create the model on the host, because one device may be too small for the whole model.
        device = jax.local_devices(backend="cpu")[0]
    graphdef, state = nnx.split(
        nnx.eval_shape(lambda: Decoder(config, dtype=config.dtype, rngs=nnx.Rngs(0)))
    )
    with jax.default_device(device):
        state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
    state = jax.device_put(state, device)
    llm = LLM(nnx.merge(graphdef, state), **options)
    del state
    llm.sleep(level=2)  # free the weights, which are zeros, before the trainer's weights arrive
    llm.update_params(nnx.state(actor, nnx.Param), mapping=mapping)
    llm.wake_up()
    return llm


def _seed_as_int(seed: jax.Array | int | None) -> int:
    """Convert a seed to an integer: None to 0, and a JAX key to its last 32-bit word."""
    if seed is None:
        return 0
    if isinstance(seed, int):
        return seed
    is_key = jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
    words = np.asarray(jax.random.key_data(seed) if is_key else seed).ravel()
    return int(words[-1])


def _padded(ids: Sequence[list[int]], width: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Pad prompts on the right. Return the tokens i32 [B, T] and the lengths i32 [B].

    T is `width`. If the longest prompt has more than `width` tokens, T is the smallest power of two
    that fits it.
    """
    lengths = np.array([len(row) for row in ids], np.int32)
    longest = int(lengths.max())
    width = width if longest <= width else 1 << (longest - 1).bit_length()
    padded = np.full((len(ids), width), pad_id, np.int32)
    for row, each in zip(padded, ids, strict=True):
        row[: len(each)] = each
    return padded, lengths


def _left_padded(padded: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Move the padding of prompts i32 [B, T] from the right to the left."""
    columns = np.arange(padded.shape[1])[None, :] + lengths[:, None]
    return np.take_along_axis(padded, columns % padded.shape[1], axis=1)


@functools.partial(jax.jit, static_argnames=("pad_id", "temperature"))
def _completion_logprobs(
    model: Decoder, prompts: jax.Array, completions: jax.Array, pad_id: int, temperature: float
) -> jax.Array:
    """Return the log-probability of each token of the completions, f32 [B, N].

    Args:
      model: the model.
      prompts: i32 [B, T], padded on the left. Each row is rotated so that its padding is on the
        right, because the model counts positions from the first column.
      completions: i32 [B, N], padded on the right.
      pad_id: id of the padding token.
      temperature: the logits are divided by this number.
    """
    T = prompts.shape[1]
    pads = jnp.sum(jnp.cumprod(prompts == pad_id, axis=1), axis=1)
    columns = jnp.arange(T)[None, :] + pads[:, None]
    moved = jnp.take_along_axis(prompts, columns % T, axis=1)
    return log_probs(model, moved, T - pads, completions, temperature=temperature)
