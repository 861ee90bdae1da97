"""Memory that an engine uses on a device, computed from sizes without allocating arrays.

    memory >= weights + state + recurrent + step
              + sum over groups of num_blocks * (block + overhead)

    weights    all parameters in their dtype
    state      sampling state of S slots (a little more than 5 * V bytes per slot), and the rows of
               the block tables for these slots
    step       temporary memory of the program that needs the most
    block      K and V of C tokens in all layers of a group, with scales if they are quantised
    recurrent  states of recurrent layers, for all slots and all snapshots
    overhead   the allocator's data about a block; also the copies that XLA makes of pools that it
               cannot update in place, see `sets_rows_in_place`
    group      layers that keep the same tokens in the same shapes; most models have one group. The
               first group, and other groups without a window, have P blocks. A group with a window
               has ``min(P, S * w)`` blocks, where w is the maximum number of blocks that a slot
               holds in this group

`Engine` and `python -m paged_jax.plan` both use this module. The values of weights, state and block
are exact. The value of step is an upper bound, which tests compare with the temporary memory of
compiled programs. It is the maximum of the following numbers of bytes, where N is the number of
tokens in a program::

    prefill    N = Sizes.max_prefill         activations(N)
    score      N = min(128, max_chunk)       activations(N) + 8 N V
    decode     N = S                         activations(N) + 40 S V
    verify     N = S (T + 1), T drafts       activations(N) + 40 S V + 4 S T V
    swap       48 blocks (two copies of 16 blocks, and a margin of another 16)
    tables     8 S M in each group

    activations(N) = 4 N (max(3 F + k (3 Fx + 3 E), 4 (H + 2 K) D) + R E) + 4 MiB

An MLP needs memory for gate, up and their product. The k experts of a token need memory for the
same three arrays, and for their inputs and outputs. Attention needs q, k and v three times: as
projected, rotated, and in the layout of the kernel. With latent attention,
`LatentSizes.num_features` replaces (H + 2 K) D. The residual stream has R = 4 arrays. On CPUs it
has L + 1 arrays, because XLA keeps the output of every layer and adds them at the end. The 4 MiB
are for the tiles of the pool that attention reads. On CPUs, each program may also make two float32
copies of an expert's gate and up weights. Without the CPU kernels of this package, it may also copy
the weights of the whole model.

A program that runs recurrent layers also holds three copies of a layer's states for S rows.

A step that samples needs memory for the logits, for copies of them, and for a copy of the sampling
state of each slot (5 * V bytes). The tests compile programs for CPUs; `tests.support.aot_parallel`
compiles programs for GPUs and TPUs ahead of time. The memory of drivers and libraries is not
included: with ``memory_fraction=0.9``, a tenth of the device memory is left for them.

If several devices compute a model together, H, K and F are the sizes on each device, see
`paged_jax.models.tensor_parallel`. V is the size of the whole vocabulary, because each device
samples from all logits. `paged_jax.dims` defines the letters. In addition, E is the hidden size, F
the intermediate size, and Fx the intermediate size of an expert.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paged_jax.cache.block_pool import NUM_DIGEST_WORDS
from paged_jax.cache.retention import AllTokens, LastState, Retention
from paged_jax.cache.sequence_blocks import num_blocks_needed
from paged_jax.formatting import format_bytes
from paged_jax.kernels.kv_dtypes import KVDtype
from paged_jax.kernels.padding import padded_head_dim, padded_state_shape
from paged_jax.kernels.platforms import copies_weights, sets_rows_in_place
from paged_jax.kernels.weight_formats import FLOAT_CODES
from paged_jax.models.config import ModelConfig
from paged_jax.models.decoder import Decoder
from paged_jax.models.layer_groups import LayerGroup, StateShape
from paged_jax.models.loading.parameters import ModelSpec
from paged_jax.models.matrix_formats import MatrixFormats
from paged_jax.models.tensor_parallel import DeviceShard
from paged_jax.runner.devices import copies_expert_weights, keeps_layer_outputs
from paged_jax.runner.sizes import Sizes
from paged_jax.sampling.constraints import Constraints
from paged_jax.sampling.state import SlotSampling

# Assumed bytes of the tiles of K and V that attention reads from the pool. They are the 4 MiB in
# the formula of `activations` in the docstring of the module.
_TILE_BYTES = 4 << 20
# Assumed number of residual-stream arrays in memory on GPUs and TPUs, R in the docstring of the
# module. With jax 0.12.0, an H200 needed 3.3 such arrays in addition to the largest array of a
# layer, and a TPU needed none.
_RESIDUALS = 4
# Temporary bytes per logit in a step that samples tokens. With jax 0.10.2, such a step needed 8.7
# arrays with 4 bytes per logit, that is, 35 bytes per logit.
_CHOICE_BYTES = 40
# A recurrent layer needs memory for three copies of the states of all rows: the old states, the new
# states, and a copy in the layout of the matmuls. With jax 0.10.2, programs needed memory for 2.4
# copies.
_STATE_COPIES = 3
_MODEL_PROGRAMS = ("prefill", "score", "decode", "verify")
# Temporary bytes per entry of the block tables in programs that fork slots. Programs were measured
# to need 4 bytes.
_TABLE_BYTES = 8
# Temporary bytes per block in programs that look up blocks in the prefix cache. Programs were
# measured to need 25 bytes.
_SEARCH_BYTES = 28


class GroupFootprint(NamedTuple):
    """Memory of the blocks in one group of layers that keep the same tokens.

    For recurrent layers, a block is the state of all these layers for a slot or a snapshot.

    Attributes:
      retention: the rule for the tokens that the layers keep.
      num_layers: number of layers in the group.
      block: bytes of K and V of a block in these layers, including scales.
      overhead: other bytes per block, see `overhead` in the docstring of the module.
      max_blocks_per_slot: maximum number of blocks that a slot holds.
      max_blocks: maximum number of blocks that all slots together hold; for recurrent layers, also
        all snapshots.
    """

    retention: Retention
    num_layers: int
    block: int
    overhead: int
    max_blocks_per_slot: int
    max_blocks: int

    def num_held(self, length: int, block_size: int) -> int:
        """Return the maximum number of blocks that `length` tokens of a slot use in this group."""
        return min(self.max_blocks_per_slot, num_blocks_needed(length, block_size))


class Footprint(NamedTuple):
    """Memory that an engine uses on a device, in bytes.

    Attributes:
      weights: bytes of all parameters.
      state: bytes of the slots: their sampling state and their rows of the block tables.
      steps: maps each kind of program, such as ``"decode"``, to its bytes of temporary memory.
      groups: memory of the blocks of each group of layers; the first group keeps the most tokens.
        Recurrent layers are the last group.
    """

    weights: int
    state: int
    steps: dict[str, int]
    groups: tuple[GroupFootprint, ...]

    @property
    def token_groups(self) -> tuple[GroupFootprint, ...]:
        """The groups with pools that grow with the first pool."""
        return tuple(group for group in self.groups if not group.retention.is_fixed)

    @property
    def sequence_state(self) -> int:
        """Bytes of the state of all recurrent layers for a single slot or snapshot."""
        return sum(group.block for group in self.groups if group.retention.is_fixed)

    @property
    def num_states(self) -> int:
        """Maximum number of these states, for slots and snapshots together."""
        return sum(group.max_blocks for group in self.groups if group.retention.is_fixed)

    @property
    def block(self) -> int:
        """Bytes of K and V of a block in all layers, including scales."""
        return sum(group.block for group in self.token_groups)

    @property
    def block_overhead(self) -> int:
        """Bytes per block that the attribute `block` does not include, summed over all groups.

        See `overhead` in the docstring of the module.
        """
        return sum(group.overhead for group in self.groups)

    @property
    def step(self) -> int:
        """The largest number of bytes of temporary memory that any program needs."""
        return max(self.steps.values())

    @property
    def recurrent(self) -> int:
        """Bytes of all states of the recurrent layers, for slots and snapshots."""
        return self.sequence_state * self.num_states

    @property
    def fixed(self) -> int:
        """Bytes of weights, slots, recurrent states and a step: everything except blocks."""
        return self.weights + self.state + self.recurrent + self.step

    @property
    def max_blocks(self) -> int:
        """Maximum number of blocks of the first group that all slots together can hold."""
        return self.groups[0].max_blocks

    def group_sizes(self, num_blocks: int) -> tuple[int, ...]:
        """Return the number of blocks of each group if the first group has `num_blocks` blocks."""
        return tuple(
            num_blocks
            if group is self.groups[0]
            else group.retention.num_pool_blocks(num_blocks, group.max_blocks)
            for group in self.groups
        )

    def pool_bytes(self, num_blocks: int, *, with_overhead: bool = False) -> int:
        """Return the bytes of the pools of `token_groups` if the first has `num_blocks` blocks.

        `with_overhead` adds the `overhead` of each block, see the docstring of the module.
        """
        sizes = zip(self.token_groups, self.group_sizes(num_blocks), strict=False)
        return sum(size * (group.block + with_overhead * group.overhead) for group, size in sizes)

    def num_blocks(self, memory: int) -> int:
        """Return the number of blocks of the first group that fit in `memory` bytes.

        The memory must also hold everything else, see `fixed`.

        Example:
          >>> group = GroupFootprint(AllTokens(), 2, 90, 10, max_blocks_per_slot=4, max_blocks=8)
          >>> Footprint(700, 100, {"decode": 200}, (group,)).num_blocks(1250)
          2
        """
        return self.num_fitting(memory - self.fixed, with_overhead=True)

    def num_fitting(self, num_bytes: int, *, with_overhead: bool = False) -> int:
        """Return the largest number of blocks of the first group for which all pools fit in memory.

        The sizes of the other pools follow from the number of blocks of the first group, see
        `group_sizes`. All pools together use at most `num_bytes`. For `with_overhead`, see
        `pool_bytes`.

        Example:
          >>> from paged_jax.cache.retention import LastTokens
          >>> whole = GroupFootprint(AllTokens(), 1, 10, 0, max_blocks_per_slot=100, max_blocks=200)
          >>> last = GroupFootprint(LastTokens(64), 5, 50, 0, max_blocks_per_slot=8, max_blocks=16)
          >>> footprint = Footprint(0, 0, {}, (whole, last))
          >>> footprint.num_fitting(1810), footprint.pool_bytes(101), footprint.num_fitting(600)
          (101, 1810, 10)
        """
        # All pools have as many blocks as the first pool, except that the pool of a group with a
        # window has at most `max_blocks`. Find the pools that reach this maximum, beginning with
        # the smallest maximum, and subtract their bytes from `num_bytes`. The bytes that remain are
        # divided among the other pools, which have equal numbers of blocks.
        window_groups = [group for group in self.groups[1:] if group.retention.frees]
        bytes_per_block = sum(
            group.block + with_overhead * group.overhead for group in self.token_groups
        )
        for group in sorted(window_groups, key=lambda group: group.max_blocks):
            if num_bytes // bytes_per_block <= group.max_blocks:
                break
            size = group.block + with_overhead * group.overhead
            num_bytes -= group.max_blocks * size
            bytes_per_block -= size
        return max(0, num_bytes // bytes_per_block)

    def check_fits(self, field: str, memory: int) -> None:
        """Check that `memory` has room for `fixed` and at least one block.

        Args:
          field: the beginning of the error message, such as "plan: memory".
          memory: bytes of memory.

        Raises:
          ValueError: no block fits. The message lists the bytes of all parts.
        """
        if self.num_blocks(memory):
            return
        block = format_bytes(self.pool_bytes(1, with_overhead=True))
        raise ValueError(
            f"{field} must leave room for {format_bytes(self.weights)} of weights, "
            f"{format_bytes(self.state + self.recurrent)} of state, {format_bytes(self.step)} of "
            f"temporary memory for a step, and {block} for at least one block, got "
            f"{format_bytes(memory)}. Use more memory, a smaller dtype, or fewer slots."
        )


def footprint(
    config: ModelConfig,
    sizes: Sizes,
    *,
    weights: int,
    formats: MatrixFormats,
    kv_dtype: DTypeLike,
    platform: str,
    shard: ModelConfig | None = None,
) -> Footprint:
    """Compute the memory that an engine uses on each of its devices.

    Args:
      config: the configuration of the model.
      sizes: sizes of the engine's programs.
      weights: bytes of the weights on the device, see `weight_bytes`.
      formats: storage formats of the weight matrices.
      kv_dtype: dtype of K and V.
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
      shard: the configuration of the part of the model on one device, see `shard_config`; None for
        a single device.

    Example:
      >>> from paged_jax import LlamaConfig
      >>> config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=172,
      ...                      num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=4)
      >>> sizes = Sizes(block_size=16, num_slots=4, max_model_len=512, max_chunk=128,
      ...               max_steps=8, num_drafts=0, max_logit_bias=32, max_stop_ids=16)
      >>> needs = footprint(config, sizes, weights=weight_bytes(config, "float32"),
      ...                   formats=MatrixFormats.of_dtype("float32", config),
      ...                   kv_dtype="float32", platform="cpu")
      >>> needs.weights, needs.state, needs.block
      (1171200, 46268, 20480)
    """
    states = _layer_states(shard or config, kv_dtype, platform)
    groups = _group_footprints(shard or config, sizes, kv_dtype, platform)
    block = sum(group.block for group in groups)
    steps = _step_bytes(shard or config, config.vocab_size, sizes, block, platform)
    # `copies_weights` handles only int8 as a quantised dtype. If it is True for int8, programs
    # convert quantised weights of every format to float32. So replace all formats by int8 here.
    dtypes = {code if code in FLOAT_CODES else "int8" for code in formats.codes}
    has_experts = bool(config.num_experts)
    if any(copies_weights(platform, dtype, has_experts=has_experts) for dtype in dtypes):
        copies = 4 * num_parameters(shard or config)
        steps = {program: num_bytes + copies for program, num_bytes in steps.items()}
    rows = _STATE_COPIES * sizes.num_slots * max(states, default=0)
    steps = {
        name: num_bytes + rows * (name in _MODEL_PROGRAMS) for name, num_bytes in steps.items()
    }
    rules = [group.retention for group in groups]
    if states:
        recurrent = LastState(), len(states), sum(states), 0, 1, sizes.num_states
        groups = *groups, GroupFootprint(*recurrent)
    return Footprint(
        weights=weights,
        state=state_bytes(config.vocab_size, sizes, rules),
        steps=steps,
        groups=groups,
    )


def _layer_states(config: ModelConfig, kv_dtype: DTypeLike, platform: str) -> list[int]:
    """Return, for each recurrent layer, the bytes of a single sequence's state."""
    default_dtype = KVDtype.of(kv_dtype).query_dtype

    def num_bytes(array: StateShape) -> int:
        size = math.prod(padded_state_shape(array.shape, platform))
        return size * jnp.dtype(array.dtype or default_dtype).itemsize

    return [
        sum(map(num_bytes, group.states)) for group in config.state_groups for _ in group.layers
    ]


def _group_footprints(
    config: ModelConfig, sizes: Sizes, kv_dtype: DTypeLike, platform: str
) -> tuple[GroupFootprint, ...]:
    groups, block_size = [], sizes.block_size
    for group in config.layer_groups:
        rule = group.retention
        blocks_per_slot = rule.max_in_slot(sizes.max_model_len, sizes.max_step_tokens, block_size)
        block = block_bytes(config, block_size, kv_dtype, platform, [group])
        overhead = record_bytes(block_size) + _SEARCH_BYTES
        if not sets_rows_in_place(platform, kv_dtype):
            # On this platform, XLA does not update pools of `kv_dtype` in place. It makes a copy in
            # the same dtype and a copy in float32, but not of all layers at the same time. These
            # copies were measured to take 1.4 to 1.5 times the memory of the pools.
            overhead += block * 3 // 2
        max_blocks = sizes.num_slots * blocks_per_slot
        groups.append(
            GroupFootprint(rule, len(group.layers), block, overhead, blocks_per_slot, max_blocks)
        )
    return tuple(groups)


def weight_layout(
    config: ModelConfig,
    dtype: DTypeLike,
    num_devices: int = 1,
    formats: MatrixFormats | None = None,
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape and dtype of every parameter, by name.

    Args:
      config: the configuration of the part of the model on one device, see `shard_config`.
      dtype: dtype of all parameters that are not quantised.
      num_devices: number of devices that compute the model together.
      formats: storage formats of the weight matrices; None for ``MatrixFormats.of_dtype(dtype)``.
    """
    shard = DeviceShard("", config.vocab_size, num_devices) if num_devices > 1 else None
    # Stack the layers if the model allows it, because JAX then traces one layer instead of all L
    # layers.
    model_class = functools.partial(Decoder, shard=shard)
    scan_layers = config.can_scan_layers
    return ModelSpec(model_class, config, dtype, scan_layers, formats=formats).parameters()


def weight_bytes(
    config: ModelConfig,
    dtype: DTypeLike,
    num_devices: int = 1,
    formats: MatrixFormats | None = None,
) -> int:
    """Return the bytes of all parameters; see `weight_layout` for the arguments."""
    layout = weight_layout(config, dtype, num_devices, formats)
    return sum(x.size * x.dtype.itemsize for x in layout.values())


def num_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of a model; tied parameters count once."""
    parameters = ModelSpec(Decoder, config, config.dtype, config.can_scan_layers).parameters()
    return sum(x.size for x in parameters.values())


def block_bytes(
    config: ModelConfig,
    block_size: int,
    kv_dtype: DTypeLike,
    platform: str,
    groups: Iterable[LayerGroup] | None = None,
) -> int:
    """Return the bytes of K and V of a block, including scales.

    The block is counted in the layers of `groups`, or in all layers if it is None.

    Example:
      >>> from paged_jax import LlamaConfig
      >>> config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=172,
      ...                      num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=4)
      >>> block_bytes(config, 16, "float32", "cpu"), block_bytes(config, 16, "int8", "cpu")
      (20480, 7680)
    """
    kv, total = KVDtype.of(kv_dtype), 0
    for group in config.layer_groups if groups is None else groups:
        if group.kv is not None:
            rows = group.num_pool_layers * group.kv.num_kv_heads * block_size
            for size in filter(None, (group.kv.head_dim, group.kv.value_dim)):
                total += rows * kv.row_bytes(padded_head_dim(size, platform))
    return total


def record_bytes(block_size: int) -> int:
    """Return the bytes that a `BlockPool` needs for the data about one block."""
    # The allocator stores these 32-bit values per block: the reference count, an entry of the free
    # queue, the digest and the token ids. `is_cached` takes one byte more.
    num_words = 2 + NUM_DIGEST_WORDS + block_size
    return 4 * num_words + 1


def state_bytes(vocab_size: int, sizes: Sizes, rules: Sequence[Retention] = (AllTokens(),)) -> int:
    """Return the bytes of a `DecodeState` that do not depend on the number of blocks.

    Args:
      vocab_size: V, number of tokens in the vocabulary.
      sizes: sizes of the engine's programs.
      rules: the rule of each group of layers; each group has its own block tables.
    """
    slot = jax.eval_shape(
        lambda: (
            SlotSampling.create(1, vocab_size, sizes.max_logit_bias, sizes.max_stop_ids),
            Constraints.create(1, vocab_size, sizes.max_forced),
        )
    )
    sampling = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(slot))
    tokens = 4 * (2 + sizes.max_stop_ids)
    # Bytes of the block tables per slot: its length, its row of block ids and, if it frees blocks,
    # its cursor. Each value takes 4 bytes.
    tables = sum(4 * (1 + sizes.max_blocks_per_slot + rule.frees) for rule in rules)
    queues = 4 * 2 * len(rules)  # Each block pool has the integers `head` and `num_free`.
    return sizes.num_slots * (sampling + tokens + tables) + queues


def _step_bytes(
    config: ModelConfig, vocab_size: int, sizes: Sizes, block: int, platform: str
) -> dict[str, int]:
    """Return the bytes of temporary memory of each kind of program.

    The docstring of the module lists the formulas.
    """
    S, T, V = sizes.num_slots, sizes.num_drafts, vocab_size
    activations = functools.partial(_activation_bytes, config, platform)
    steps = {
        "prefill": activations(sizes.max_prefill),
        "score": activations(sizes.score_width) + 8 * sizes.score_width * V,
        "decode": activations(S) + _CHOICE_BYTES * S * V,
        "swap": 3 * sizes.swap_width * block,
        "tables": _TABLE_BYTES * S * sizes.max_blocks_per_slot * len(config.layer_groups),
    }
    if T:
        steps["verify"] = activations(S * (T + 1)) + _CHOICE_BYTES * S * V + 4 * S * T * V
    return steps


def _activation_bytes(config: ModelConfig, platform: str, num_tokens: int) -> int:
    bytes_per_layer = max(
        part.num_features(config.hidden_size) for spec in {*config.layers} for part in spec.walk()
    )
    num_residuals = _RESIDUALS
    if keeps_layer_outputs(platform):
        num_residuals = config.num_hidden_layers + 1
    activations = 4 * num_tokens * (bytes_per_layer + num_residuals * config.hidden_size)
    return (
        activations
        + _TILE_BYTES
        + (_expert_bytes(config) if copies_expert_weights(platform) else 0)
    )


def _expert_bytes(config: ModelConfig) -> int:
    """Return the bytes of two float32 copies of an expert's gate and up weights."""
    experts = (spec.experts for spec in config.layers)
    sizes = (
        expert.features * (expert.latent_size or config.hidden_size) for expert in experts if expert
    )
    return 2 * 4 * 2 * max(sizes, default=0)
