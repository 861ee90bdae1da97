"""Formats of the matrices of a model, guessed from its ``config.json`` for memory plans.

If the folder has weights, `paged_jax.models.loading.pretrained.read_formats` gives the exact
formats. The config does not name the dtype of scales, so this module assumes the usual dtype of
each tool.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from paged_jax.kernels.weight_formats import WeightFormat
from paged_jax.models.loading.parameters import ModelSpec
from paged_jax.models.loading.stored_matrices import fit_format
from paged_jax.models.loading.tensor_map import map_parameter
from paged_jax.models.matrix_formats import MatrixFormats, is_matrix, name_of
from paged_jax.models.quantisation import Quantisation, Scheme
from paged_jax.models.tensor_parallel import divides_inputs


def _integers(scale_dtype: str) -> Callable[[Scheme], WeightFormat]:
    def make(scheme: Scheme) -> WeightFormat:
        code = "int4" if scheme.bits == 4 else "int8"
        has_minima = scheme.has_zero_points and not scheme.is_symmetric
        min_dtype = "float32" if has_minima else None
        return WeightFormat(code, scheme.block[1], scale_dtype, min_dtype)

    return make


def _mlx(scheme: Scheme) -> WeightFormat:
    code, min_dtype = ("uint4", "bfloat16") if scheme.bits == 4 else ("int8", "float32")
    return WeightFormat(code, scheme.block[1], "bfloat16", min_dtype)


def _fp8(scheme: Scheme) -> WeightFormat:
    scale_dtype = "bfloat16" if scheme.exponent_scales else "float32"
    return WeightFormat("float8_e4m3fn", scheme.block[1], scale_dtype)


_MXFP4 = WeightFormat("e2m1", 32, "bfloat16")
_NVFP4 = WeightFormat("e2m1", 16, "float32")
_FORMATS: Mapping[str, Callable[[Scheme], WeightFormat]] = {
    "fp8": _fp8,
    "int8": _integers("bfloat16"),
    "packed": _integers("bfloat16"),
    "nvfp4": lambda scheme: _NVFP4,
    "modelopt-nvfp4": lambda scheme: _NVFP4,
    "mxfp4": lambda scheme: _MXFP4,
    "mxfp4-experts": lambda scheme: _MXFP4,
    "awq": _integers("float16"),
    "gptq": _integers("float16"),
    "bitsandbytes-4": lambda scheme: WeightFormat("nf4", 64, "float32"),
    "bitsandbytes-8": lambda scheme: WeightFormat("int8", None, "float32"),
    "mlx": _mlx,
    "mlx-mxfp4": lambda scheme: _MXFP4,
}
# Schemes that also quantise embeddings and the output head.
_OF_EMBEDDINGS = ("mlx", "mlx-mxfp4")


def plan_formats(
    spec: ModelSpec, quantisation: Quantisation, *, num_devices: int = 1
) -> MatrixFormats:
    """Return the formats that the matrices of a model will probably have.

    Args:
      spec: the model with matrices of floats.
      quantisation: the quantisation that its config describes.
      num_devices: number of devices that compute the model together.
    """
    floats = WeightFormat(name_of(spec.dtype))
    formats = {}
    for name, shape in spec.separate_shapes().items():
        if not is_matrix(name):
            continue
        schemes = [
            _scheme_of(quantisation, mapping.tensor.removesuffix(".weight"))
            for mapping in map_parameter(spec.config, name)
        ]
        # A matrix is expanded if only some of its tensors are quantised.
        scheme = schemes[0] if all(each == schemes[0] for each in schemes) else None
        format: WeightFormat | str = floats
        if scheme is not None:
            num_parts = num_devices if divides_inputs(name) else 1
            format = _FORMATS[scheme.reader](scheme)
            if math.gcd(format.group_size or shape[-1], shape[-1]) == shape[-1]:
                format = replace(format, group_size=None)
            format = fit_format(format, shape[-1], num_parts)
        formats[name] = floats if isinstance(format, str) else format
    return MatrixFormats.create(formats)


def _scheme_of(quantisation: Quantisation, module: str) -> Scheme | None:
    scheme = quantisation.scheme_of(module)
    if scheme is None or quantisation.ignoring(module) is not None:
        return None
    if module.endswith((".embed_tokens", "lm_head")) and scheme.reader not in _OF_EMBEDDINGS:
        return None
    is_expert = ".experts." in module
    if scheme.reader == "mxfp4-experts" and not is_expert:
        return None
    is_router = module.endswith((".gate", ".router", ".shared_expert_gate"))
    return None if is_router else scheme
