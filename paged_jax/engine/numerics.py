"""How an engine's model computes: exact or fast numerics, int8 activations, cascade attention.

`apply_numerics` decides whether int8 activations run.
`PagedModel.with_numerics` decides which backends compute exact numerics, and `kernels.op`
which backend is the best for a device.
"""

import jax
from flax import nnx

from paged_jax.arguments import ArgumentError
from paged_jax.engine.config import EngineConfig
from paged_jax.engine.pool_size import resolve_kv_dtype
from paged_jax.kernels.platforms import int8_inputs_refusal
from paged_jax.models.config import ModelConfig
from paged_jax.models.paged_model import PagedModel
from paged_jax.runner.devices import gains_from_cascade


def apply_numerics(options: EngineConfig, model: PagedModel) -> PagedModel:
    """Return the model with the engine's numerics, int8 activations and the dtype of its cache.

    Raises:
      ValueError: the model, the backend or the device does not support them.
    """
    [platform] = {device.platform for device in jax.tree.leaves(nnx.state(model))[0].devices()}
    dtype = resolve_kv_dtype(options.kv_dtype, model.float_dtype, platform)
    try:
        model = model.with_numerics(options.numerics, dtype, options.backend)
    except ArgumentError as error:
        raise ArgumentError("Engine", error.problem, error.field) from None
    if not options.int8_activations:
        return model
    if options.backend not in (None, "cpu"):
        reason = f"with the backend {options.backend!r}"
    else:
        reason = int8_inputs_refusal(platform, model.matrix_formats.codes)
    if reason is not None:
        raise ArgumentError("Engine", f"must be False {reason}, got True.", "int8_activations")
    return model.with_int8_activations()


def uses_cascade(options: EngineConfig, model_config: ModelConfig, platform: str) -> bool:
    """Return whether decoding uses cascade attention.

    With cascade attention, a step reads a block once, not once per sequence, if all sequences
    share the block.

    Args:
      options: the options of the engine.
      model_config: the configuration of the model.
      platform: the platform that the engine runs on, such as ``"cpu"``.

    Raises:
      ValueError: `cascade_attention` is True, but all layers of the model have a sliding
          window.
    """
    has_window = None not in model_config.sliding_windows
    if options.cascade_attention and has_window:
        raise ValueError(
            "Engine: cascade_attention must be False if all layers have a sliding window."
        )
    if options.numerics == "exact":
        return False
    if options.cascade_attention is None:
        is_faster = gains_from_cascade(platform) and options.enable_prefix_caching
        return is_faster and not has_window
    return options.cascade_attention
