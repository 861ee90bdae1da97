"""Reader of a checkpoint's quantisation config: the quantised modules and their formats.

Most checkpoints have this config in ``config.json`` (`quantization_config`), others in a separate
file. An entry that changes the weights is either read, or rejected with an error that names it.
Entries about quantised activations are accepted, but have no effect: activations are not quantised.
"""

import dataclasses
import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paged_jax.arguments import is_int
from paged_jax.models.errors import UnsupportedConfigError
from paged_jax.models.model_folder import read_config_json, read_json

# Keys of config.json that may hold a quantisation config. MLX writes the first two of them.
QUANTISATION_KEYS = ("quantization", "quantization_config", "compression_config")
# Quantisation configs of older tools, and the method to assume if the file does not state it.
_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}

# For each method, keys of its quantisation config that do not affect the weights.
_FP8_KEYS = ("quant_method", "dequantize", "modules_to_convert", "activation_scale_ub")
_TOOL_KEYS = (
    "quant_method", "method", "act_group_aware", "adapter_config", "autoround_version", "backend",
    "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment",
    "damp_percent", "dataset", "exllama_config", "fuse_max_seq_len", "do_fuse", "iters", "lm_head",
    "max_input_length", "meta", "mock_quantization", "model_file_base_name", "model_name_or_path",
    "model_seqlen", "module_name_preceding_first_block", "modules_in_block_to_quantize",
    "modules_to_fuse", "mse", "offload_to_disk", "offload_to_disk_path", "pad_token_id",
    "parallel_packing", "quantizer", "static_groups", "tokenizer", "true_sequential", "uri",
    "use_cuda_fp16", "use_exllama", "v2",
)  # fmt: skip
_BITSANDBYTES_KEYS = (
    "quant_method", "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant",
    "llm_int8_enable_fp32_cpu_offload", "llm_int8_threshold",
)  # fmt: skip
_COMPRESSED_KEYS = ("quant_method", "quantization_status", "version", "global_compression_ratio")
# Keys about a quantised KV cache. Its scales are not used.
_KV_CACHE_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_quant_method")
_WEIGHTS_KEYS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "dynamic")
_COMPRESSED_BITS = {
    "float-quantized": (8,),
    "int-quantized": (8,),
    "naive-quantized": (8,),
    "pack-quantized": (4, 8),
    "nvfp4-pack-quantized": (4,),
    "mxfp4-pack-quantized": (4,),
}


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Format of a quantised matrix ``[out, in]``.

    Attributes:
      reader: name of the class that reads the tensors, a key of `READERS`.
      bits: bits per value.
      block: number of outputs and of inputs that share one scale; None for all outputs or inputs.
      has_zero_points: whether zero points are stored; None if the tensors in the files tell it.
      zero_offset: number that must be added to the stored zero points.
      is_symmetric: whether the stored zero points are always the middle of the range.
      exponent_scales: whether each scale is stored as the exponent of a power of two.
    """

    reader: str
    bits: int = 8
    block: tuple[int | None, int | None] = (1, None)
    has_zero_points: bool | None = None
    zero_offset: int = 0
    is_symmetric: bool = False
    exponent_scales: bool = False


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Entry of a quantisation config that selects modules by name.

    Attributes:
      text: the entry as it is written in the config.
      parts: consecutive parts of the names that it selects, as in `_split`; empty if `regex`
        selects the modules.
      regex: regular expression. It selects a module if it matches from the start of the name.
    """

    text: str
    parts: tuple[str, ...] = ()
    regex: re.Pattern[str] = re.compile("")


class _PatternIndex:
    """Finds the first of many patterns that selects a module.

    Configs list up to several hundred modules, and a mixture of experts has 100,000 of them, so
    plain names are looked up instead of compared one by one.

    Args:
      patterns: the patterns, in the order in which they apply.
    """

    def __init__(self, patterns: Sequence[Pattern]):
        self._by_parts: dict[tuple[str, ...], int] = {}
        for index, pattern in enumerate(patterns):
            if pattern.parts:
                self._by_parts.setdefault(pattern.parts, index)
        self._lengths = sorted({len(parts) for parts in self._by_parts})
        self._others = [(i, each.regex) for i, each in enumerate(patterns) if not each.parts]

    def find(self, module: str) -> int | None:
        """Return the index of the first pattern that selects a module; None if none does."""
        parts = _split(module)
        found = [
            self._by_parts[piece]
            for length in self._lengths
            for start in range(len(parts) - length + 1)
            if (piece := parts[start : start + length]) in self._by_parts
        ]
        found += (index for index, regex in self._others if regex.match(module))
        return min(found, default=None)


def _split(module: str) -> tuple[str, ...]:
    """Return the parts of a module's name, between empty parts that mark its ends.

    Example:
      >>> _split("layers.0.mlp")
      ('', 'layers', '0', 'mlp', '')
    """
    return ("", *module.split("."), "")


@dataclasses.dataclass(frozen=True)
class Quantisation:
    """Description of the quantised modules of a checkpoint.

    Attributes:
      source: file and key of the quantisation config, for error messages.
      schemes: pairs of a pattern and the scheme of the modules that it selects; None as the scheme
        means that they are not quantised. The first matching pattern applies.
      ignored: patterns of modules that are not quantised.
    """

    source: str
    schemes: tuple[tuple[Pattern, Scheme | None], ...]
    ignored: tuple[Pattern, ...] = ()

    @functools.cached_property
    def _ignored_index(self) -> _PatternIndex:
        return _PatternIndex(self.ignored)

    @functools.cached_property
    def _scheme_index(self) -> _PatternIndex:
        return _PatternIndex([pattern for pattern, _ in self.schemes])

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the scheme of the first pattern that matches a module; None if unquantised."""
        index = self._scheme_index.find(module)
        return None if index is None else self.schemes[index][1]

    def ignoring(self, module: str) -> str | None:
        """Return the config entry that excludes a module from quantisation; None if none does."""
        if (index := self._ignored_index.find(module)) is not None:
            return self.ignored[index].text
        if (index := self._scheme_index.find(module)) is None:
            return None
        pattern, scheme = self.schemes[index]
        return pattern.text if scheme is None else None


EVERYTHING = Pattern("Linear")
# Names in which no character has a special meaning, except that a dot separates two parts.
_PLAIN_NAME = re.compile(r"[\w-]+(\.[\w-]+)*")


def find_quantisation(config: Mapping[str, Any], *, has_mxfp4: bool = False) -> Quantisation | None:
    """Return the quantisation of a ``config.json``; None if weights are not quantised.

    Args:
      config: content of the file.
      has_mxfp4: whether the family supports the method ``"mxfp4"``.

    Raises:
      UnsupportedConfigError: an entry is not supported. The message names it.
    """
    found = {key: config[key] for key in QUANTISATION_KEYS if config.get(key)}
    if not found:
        return None
    # MLX writes the same object under the keys "quantization" and "quantization_config".
    key = "quantization_config" if "quantization_config" in found else next(iter(found))
    if len(found) > 1 and any(value != found[key] for value in found.values()):
        raise UnsupportedConfigError(
            f"LlamaConfig: {' and '.join(found)} must be equal. Keep only the correct one."
        )
    method = "mlx" if "quantization" in found else None
    if key == "compression_config":
        method = "compressed-tensors"
    return _read(Entries(found[key], f"LlamaConfig: {key}"), method, has_mxfp4)


def read_quantisation(folder: Path, *, has_mxfp4: bool = False) -> Quantisation | None:
    """Return the quantisation of the model in a folder; None if weights are not quantised.

    Args:
      folder: the folder.
      has_mxfp4: whether the method ``"mxfp4"`` is supported for the family.

    Raises:
      UnsupportedConfigError: an entry is not supported. The message names it.
    """
    if (folder / "config.json").is_file():
        config = read_config_json(folder)
        text = config.get("text_config")
        for each in (config, text if isinstance(text, Mapping) else {}):
            if quantisation := find_quantisation(each, has_mxfp4=has_mxfp4):
                return quantisation
    for name, method in _FILES.items():
        if (folder / name).is_file():
            content = read_json(folder / name)
            if method == "modelopt":
                content = content.get("quantization") or content
            return _read(Entries(content, f"{folder / name}: config"), method, has_mxfp4)
    return None


class Entries:
    """Reader of a JSON object. It records which entries were read, to reject the others.

    Args:
      content: the JSON object.
      where: description of the object's place, for error messages.
    """

    def __init__(self, content: Any, where: str):
        if not isinstance(content, Mapping):
            raise UnsupportedConfigError(f"{where} must be a JSON object, got {content!r}.")
        self.content, self.where = content, where
        self._read: set[str] = set()

    def get(self, *keys: str) -> Any:
        """Return the first value under `keys` that is not null; None if all are missing or null."""
        self._read |= {*keys}
        return next((self.content[key] for key in keys if self.content.get(key) is not None), None)

    def choice(self, *keys: str, choices: Iterable[Any], default: Any = None) -> Any:
        """Check that a value is one of `choices`, and return it. Strings become lower case."""
        value = self.get(*keys)
        value = default if value is None else value
        value = value.lower() if isinstance(value, str) else value
        choices = [*choices]
        if not any(value == each and type(value) is type(each) for each in choices):
            names = ", ".join("null" if each is None else str(each) for each in choices)
            raise self.error(keys[0], f"must be {names}", value)
        return value

    def size(self, *keys: str, default: int | None = None) -> int | None:
        """Return a positive integer, or None for -1. If the entry is missing, return `default`."""
        value = self.get(*keys)
        value = default if value is None else value
        if value is None or is_int(value) and value == -1:
            return None
        if not is_int(value) or not 0 < value < 1 << 31:
            raise self.error(keys[0], "must be a positive integer or -1", value)
        return value

    def names(self, *keys: str) -> tuple[str, ...]:
        """Return all names in the lists under several keys."""
        found: list[str] = []
        for key in keys:
            value = self.get(key)
            if value is None:
                continue
            if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
                raise self.error(key, "must be a list of names", value)
            found += value
        return tuple(found)

    def section(self, key: str) -> "Entries | None":
        """Return a reader of the object under a key; None if the key is missing or null."""
        value = self.get(key)
        return None if value is None else Entries(value, f"{self.where}.{key}")

    def finish(self, harmless: Iterable[str] = ()) -> None:
        """Reject unread entries, unless their key is harmless, or they are empty, false or 0."""
        for key, value in self.content.items():
            if key not in self._read and key not in harmless and value not in (None, False, "", 0):
                if value != {} and value != []:
                    raise self.error(key, "is not supported and must be null", value)

    def error(self, key: str, rule: str, value: Any) -> UnsupportedConfigError:
        """Return the error for the value of an entry that violates a rule."""
        text = repr(value) if len(repr(value)) <= 80 else repr(value)[:80] + "..."
        return UnsupportedConfigError(f"{self.where}.{key} {rule}, got {text}.")


def _read(entries: Entries, method: str | None, has_mxfp4: bool) -> Quantisation:
    method = entries.get("quant_method") or method
    if entries.get("quant_algo") and method is None:
        method = "modelopt"
    methods = {name: read for name, read in _METHODS.items() if has_mxfp4 or name != "mxfp4"}
    if not isinstance(method, str) or method not in methods:
        raise UnsupportedConfigError(
            f"{entries.where}.quant_method {method!r} is not supported for this family, which "
            f"supports {', '.join(methods)}. Use a version of the model that is quantised "
            "differently or not at all."
        )
    return methods[method](entries)


def _read_fp8(entries: Entries) -> Quantisation:
    """Read the fp8 config of transformers, DeepSeek, Qwen or AutoFP8."""
    entries.choice("fmt", choices=("e4m3", "float8_e4m3fn"), default="e4m3")
    entries.choice("activation_scheme", choices=("dynamic", "static"), default="dynamic")
    entries.choice("expert_dtype", choices=("fp8",), default="fp8")
    scales = entries.choice("scale_fmt", choices=("float", "ue8m0"), default="float")
    block = entries.get("weight_block_size")
    if block is not None:
        block = _block(entries, "weight_block_size", block)
    scheme = Scheme("fp8", block=block or (None, None), exponent_scales=scales == "ue8m0")
    return _finish(entries, scheme, _FP8_KEYS, "modules_to_not_convert", "ignored_layers", "ignore")


def _read_fbgemm(entries: Entries) -> Quantisation:
    return _finish(entries, Scheme("fp8"), _FP8_KEYS, "modules_to_not_convert")


def _read_awq(entries: Entries) -> Quantisation:
    bits = entries.choice("bits", "w_bit", choices=(4,), default=4)
    entries.choice("zero_point", choices=(True,), default=True)
    entries.choice("version", "format", choices=("gemm",), default="gemm")
    entries.choice("pack_dtype", choices=("int32",), default="int32")
    for key in ("sym", "desc_act"):  # written by transformers, without effect
        entries.get(key)
    group = entries.size("group_size", "q_group_size", default=128)
    scheme = Scheme("awq", bits, (1, group), has_zero_points=True)
    return _finish(entries, scheme, _TOOL_KEYS, "modules_to_not_convert")


def _read_gptq(entries: Entries) -> Quantisation:
    def scheme(part: Entries, **base: Any) -> Scheme:
        is_symmetric = part.choice("sym", choices=(True, False), default=base.get("sym", True))
        part.choice("desc_act", choices=(True, False), default=False)
        return Scheme(
            "gptq",
            part.choice("bits", choices=(4, 8), default=base.get("bits")),
            (1, part.size("group_size", default=base.get("group_size", 128))),
            has_zero_points=True,
            zero_offset=offset,
            is_symmetric=is_symmetric,
        )

    formats = ("gptq", "gptq_v2")
    offset = int(entries.choice("checkpoint_format", "format", choices=formats, default="gptq")
                 == "gptq")  # fmt: skip
    entries.choice("pack_dtype", choices=("int32",), default="int32")
    usual = scheme(entries)
    base = {"sym": usual.is_symmetric, "bits": usual.bits, "group_size": usual.block[1] or -1}
    schemes: list[tuple[Pattern, Scheme | None]] = []
    dynamic = entries.section("dynamic")
    for name in dynamic.content if dynamic else ():
        assert dynamic is not None
        pattern = _expression(dynamic, name, re.sub(r"^[+-]:", "", name))
        if name.startswith("-:"):
            schemes.append((pattern, None))
        elif (part := dynamic.section(name)) is not None:
            schemes.append((pattern, scheme(part, **base)))
            part.finish(_TOOL_KEYS)
    ignored = _module_patterns(entries, entries.names("modules_to_not_convert"))
    entries.finish(_TOOL_KEYS)
    return Quantisation(entries.where, (*schemes, (EVERYTHING, usual)), ignored)


def _read_bitsandbytes(entries: Entries) -> Quantisation:
    flags = (True, False)
    is_4_bits = entries.choice("load_in_4bit", "_load_in_4bit", choices=flags, default=False)
    is_8_bits = entries.choice("load_in_8bit", "_load_in_8bit", choices=flags, default=False)
    if is_4_bits == is_8_bits:
        raise entries.error("load_in_4bit", "must differ from load_in_8bit", is_4_bits)
    entries.choice("bnb_4bit_quant_type", choices=("nf4", "fp4"), default="fp4")
    entries.choice("bnb_4bit_quant_storage", choices=("uint8", "torch.uint8"), default="uint8")
    # 64 is the block size of bitsandbytes by default. The actual block size is found from the
    # tensors.
    scheme = Scheme("bitsandbytes-4", 4, (1, 64)) if is_4_bits else Scheme("bitsandbytes-8")
    return _finish(entries, scheme, _BITSANDBYTES_KEYS, "llm_int8_skip_modules")


def _read_mxfp4(entries: Entries) -> Quantisation:
    keys = ("quant_method", "dequantize")
    return _finish(entries, Scheme("mxfp4-experts", 4, (1, 32)), keys, "modules_to_not_convert")


def _read_mlx(entries: Entries) -> Quantisation:
    def scheme(part: Entries, usual: Scheme | None) -> Scheme:
        is_affine = part.choice("mode", choices=("affine", "mxfp4"), default="affine") == "affine"
        choices = (4, 8) if is_affine else (4,)
        bits = part.choice("bits", choices=choices, default=usual.bits if usual else 4)
        group = part.size("group_size", default=(usual.block[1] if usual else None) or 64)
        reader = "mlx" if is_affine else "mlx-mxfp4"
        return Scheme(reader, bits, (1, group), has_zero_points=is_affine or None)

    usual = scheme(entries, None)
    schemes: list[tuple[Pattern, Scheme | None]] = []
    for name, value in entries.content.items():
        if isinstance(value, Mapping | bool):  # an entry for a module
            part = None if value is False else entries.section(name) if value is not True else None
            module = Pattern(name, _split(name))
            entries.get(name)
            schemes.append((module, scheme(part, usual) if part else None if not value else usual))
            if part:
                part.finish()
    entries.finish(("quant_method",))
    return Quantisation(entries.where, (*schemes, (EVERYTHING, usual)))


def _read_modelopt(entries: Entries) -> Quantisation:
    algorithm = entries.choice("quant_algo", choices=("fp8", "nvfp4"))
    group = entries.size("group_size", default=16)
    if algorithm == "fp8":
        scheme = Scheme("fp8", block=(None, None))
    else:
        scheme = Scheme("modelopt-nvfp4", 4, (1, group))
    names = entries.names("exclude_modules", "ignore")
    ignored = [
        Pattern(name, tuple(name.split(".")))
        if _PLAIN_NAME.fullmatch(name)
        else Pattern(
            name,
            regex=re.compile(rf"{fnmatch.translate(name)}|(?:.*\.)?{re.escape(name)}(?:\.|$)"),
        )
        for name in names
    ]
    harmless = ("quant_method", "producer", "config_groups", *_KV_CACHE_KEYS)
    entries.finish(harmless)
    return Quantisation(entries.where, ((EVERYTHING, scheme),), tuple(ignored))


def _read_compressed(entries: Entries) -> Quantisation:
    """Read a config of compressed-tensors."""
    formats = (*_COMPRESSED_BITS, "dense", "mixed-precision")
    usual = entries.choice("format", choices=formats, default="dense")
    for key in ("sparsity_config", "moe_sparsity_config"):
        if sparsity := entries.section(key):
            sparsity.choice("format", choices=("dense",), default="dense")
    exact: list[tuple[Pattern, Scheme | None]] = []
    others: list[tuple[Pattern, Scheme | None]] = []
    groups = entries.section("config_groups")
    for name in groups.content if groups else ():
        assert groups is not None
        group = groups.section(name)
        if group is None:
            continue
        scheme = _compressed_scheme(group, usual)
        for target in group.names("targets"):
            pattern = EVERYTHING if target == "Linear" else _compressed_pattern(group, target)
            (others if target == "Linear" else exact).append((pattern, scheme))
        group.finish(("input_activations", "output_activations"))
    ignored = [_compressed_pattern(entries, name) for name in entries.names("ignore")]
    entries.finish((*_COMPRESSED_KEYS, *_KV_CACHE_KEYS))
    return Quantisation(entries.where, (*exact, *others), tuple(ignored))


def _compressed_scheme(group: Entries, usual: str) -> Scheme | None:
    weights = group.section("weights")
    if weights is None:  # only activations are quantised
        group.get("format")
        return None
    format = group.choice("format", choices=_COMPRESSED_BITS, default=usual)
    kind = weights.choice("type", choices=("int", "float"), default="int")
    bits = weights.choice("num_bits", choices=_COMPRESSED_BITS[format], default=8)
    strategies = ("tensor", "channel", "group", "block", "tensor_group")
    strategy = weights.choice("strategy", choices=strategies, default="tensor")
    weights.choice("actorder", choices=(None, False, True, "weight", "static", "group", "dynamic"))
    is_symmetric = weights.choice("symmetric", choices=(True, False), default=True)
    size, block = weights.size("group_size"), weights.get("block_structure")
    shapes = {"tensor": (None, None), "channel": (1, None)}
    if strategy == "block":
        shapes["block"] = _block(weights, "block_structure", block)
    elif strategy not in shapes:
        if size is None:
            raise weights.error("group_size", f"must be positive for strategy {strategy}", size)
        shapes[strategy] = (1, size)
    weights.finish(_WEIGHTS_KEYS)
    readers = {
        "pack-quantized": "packed",
        "nvfp4-pack-quantized": "nvfp4",
        "mxfp4-pack-quantized": "mxfp4",
    }
    is_float = format.startswith(("nvfp4", "mxfp4", "float"))
    if format != "naive-quantized" and is_float != (kind == "float"):
        raise weights.error("type", f"must fit the format {format}", kind)
    reader = readers.get(format) or ("fp8" if kind == "float" else "int8")
    return Scheme(reader, bits, shapes[strategy], has_zero_points=not is_symmetric)


def _finish(entries: Entries, scheme: Scheme, harmless: Iterable[str], *keys: str) -> Quantisation:
    """Reject unread entries, and return a quantisation with one scheme for all modules."""
    ignored = _module_patterns(entries, entries.names(*keys))
    entries.finish((*harmless, *_KV_CACHE_KEYS))
    return Quantisation(entries.where, ((EVERYTHING, scheme),), ignored)


def _block(entries: Entries, key: str, block: Any) -> tuple[int, int]:
    """Return the size of a block (outputs, inputs), given as a list or as ``"128x128"``."""
    if isinstance(block, str):
        block = [int(size) if size.isdecimal() else 0 for size in block.split("x")]
    is_valid = isinstance(block, list | tuple) and len(block) == 2 and all(map(is_int, block))
    if not is_valid or not all(0 < size < 1 << 31 for size in block):
        raise entries.error(key, "must be two positive sizes", block)
    return block[0], block[1]


def _expression(entries: Entries, text: str, expression: str) -> Pattern:
    try:
        return Pattern(text, regex=re.compile(expression))
    except (re.error, RecursionError, OverflowError) as error:
        raise UnsupportedConfigError(
            f"{entries.where}: {text!r} must be a valid regular expression: {error}."
        ) from None


def _module_patterns(entries: Entries, names: Iterable[str]) -> tuple[Pattern, ...]:
    """Return patterns that select modules by parts of names: "mlp" selects "layers.0.mlp.up"."""
    patterns: list[Pattern] = []
    for name in names:
        if _PLAIN_NAME.fullmatch(name):
            patterns.append(Pattern(name, tuple(name.split("."))))
        else:
            inside = rf"(?:.*\.)?(?:{name})(?:\.|$)"
            is_regex = name.startswith("re:")
            patterns.append(_expression(entries, name, name[3:] if is_regex else inside))
    return tuple(patterns)


def _compressed_pattern(entries: Entries, name: str) -> Pattern:
    if name.startswith("re:"):
        return _expression(entries, name, name[3:])
    return Pattern(name, _split(name))


_METHODS: Mapping[str, Callable[[Entries], Quantisation]] = {
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fbgemm,
    "compressed-tensors": _read_compressed,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "bitsandbytes": _read_bitsandbytes,
    "modelopt": _read_modelopt,
    "modelopt_fp4": _read_modelopt,
    "mlx": _read_mlx,
    "mxfp4": _read_mxfp4,
}
