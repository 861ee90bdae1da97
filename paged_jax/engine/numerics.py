"""How an engine's model computes: exact or fast numerics, int8 activations, cascade attention.

All three change the last bits of logits. `layer_backend` decides whether int8 activations run.
`PagedModel.with_numerics` decides which backends compute exact numerics, and `kernels.op`
which backend is the best for a device.
"""

import jax
from flax import nnx

from paged_jax.arguments import ArgumentError
from paged_jax.engine.config import EngineConfig
from paged_jax.engine.pool_size import resolve_kv_dtype
from paged_jax.kernels.op import BACKENDS
from paged_jax.models.config import ModelConfig
from paged_jax.models.paged_model import PagedModel
from paged_jax.runner.devices import gains_from_cascade


def layer_backend(options: EngineConfig, model: PagedModel, platform: str) -> str | None:
    """Return the name of the kernel backend that the layers of the model use.

    It is ``options.backend``, or ``"cpu_int8"`` if ``options.int8_activations`` is True.

    Raises:
      ValueError: int8 activations are not possible with the backend, the device or the model.
    """
    if not options.int8_activations:
        return options.backend
    if options.backend not in (None, "cpu"):
        reason = f"with the backend {options.backend!r}"
    elif platform != "cpu":
        reason = f"on a device of {platform}"
    elif (
        reason := BACKENDS["cpu_int8"].unavailable_for(model.matrix_formats.codes, "", "")
    ) is None:
        return "cpu_int8"
    raise ArgumentError("Engine", f"must be False {reason}, got True.", "int8_activations")


def apply_numerics(options: EngineConfig, model: PagedModel) -> PagedModel:
    """Return the model with the engine's numerics and the dtype of its cache."""
    [platform] = {device.platform for device in jax.tree.leaves(nnx.state(model))[0].devices()}
    dtype = resolve_kv_dtype(options.kv_dtype, model.float_dtype, platform)
    try:
        return model.with_numerics(options.numerics, dtype, options.backend)
    except ArgumentError as error:
        raise ArgumentError("Engine", error.problem, error.field) from None


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
