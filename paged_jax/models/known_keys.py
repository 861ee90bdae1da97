"""Keys of a ``config.json`` that no family has to read.

An entry that is not read is harmless, or an error if it is known to change the computation, or
named in a warning.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from paged_jax.models.config_json import (
    ConfigEntries,
    as_json,
    read_names,
    read_object,
    warn_of_unknown,
)
from paged_jax.models.errors import UnsupportedConfigError
from paged_jax.models.layer_groups import FULL

# Keys that change the computation, each with the value that has no effect. A config with any other
# value is rejected, unless its family reads the key.
_NEUTRAL: Mapping[str, Any] = {
    "mlp_bias": False,
    "is_causal": True,
    # transformers' base class gives the next two keys to every family.
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "use_bidirectional_attention": False,
    "use_qk_norm": False,
    # Only Cohere's files have the next three keys. transformers does not read them.
    "use_parallel_block": True,
    "use_gated_activation": True,
    "rotary_pct": 1,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "attention_multiplier": None,
    "query_pre_attn_scalar": None,
    "embedding_multiplier": 1,
    "residual_multiplier": 1,
    "logits_scaling": 1,
    "logit_scale": 1,
    "attention_bias": False,
    "sliding_window": None,
    # Experts.
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "first_k_dense_replace": 0,
    "n_shared_experts": 0,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1,
    "clip_qkv": None,
}

# Keys that are not read, and do not change the logits of the model.
_HARMLESS = frozenset((
    # Training, and the initial values of weights.
    # See also `_TRAINING_WORDS`.
    "altup_coef_clip", "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init",
    "conv_use_xavier_init", "gradient_checkpointing", "init_method", "initializer_factor",
    "linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max",
    "linear_dt_min", "output_router_logits", "pretraining_tp", "rescale_prenorm_residual",
    "router_jitter_noise", "seq_aux", "time_step_floor", "time_step_max", "time_step_min",
    # Layers for multi-token prediction, which are not loaded. See also `_HARMLESS_PREFIXES`.
    "num_mtp_layers", "num_mtp_modules", "num_nextn_predict_layers", "use_mtp",
    # How a program computes: kernels, sizes of chunks, parallelism, dtypes of intermediate values.
    "attn_implementation", "cache_implementation", "chunk_size", "chunk_size_feed_forward",
    "ep_size", "experts_implementation", "mamba_chunk_size", "mamba_ssm_cache_dtype",
    "mamba_ssm_dtype", "moe_shared_expert_overlap", "num_logits_to_keep", "residual_in_fp32",
    "use_cache", "use_mamba_kernels",
    # What a program returns, and tasks other than text generation.
    "finetuning_task", "id2label", "label2id", "num_labels", "output_attentions",
    "output_hidden_states", "output_scores", "prefix", "problem_type", "return_dict",
    "return_dict_in_generate", "task_specific_params", "use_return_dict",
    # Names, versions, and tokens that the tokenizer's own files determine.
    "architectures", "auto_map", "cls_token_id", "decoder_start_token_id", "dtype",
    "is_llama_config", "mask_token_id", "max_length", "model_max_length", "pad_token_id",
    "sep_token_id", "tokenizer_class", "torch_dtype", "transformers.js_config",
    "transformers_version", "unk_token_id",
    # How transformers writes the file.
    "allow_global_per_layer_attribute_access", "serialize_explicit_per_layer_config",
    # Second names of other keys, and sizes that follow from other keys.
    "block_dim", "block_norm_eps", "conv_dim", "conv_dim_out", "expand", "expert_intermediate_size",
    "experts_per_token", "hidden_act", "initial_context_length", "mamba_proj_bias", "num_heads",
    "qk_head_dim", "sliding_window_size",
    # Keys that are read only together with others.
    "block_ffn_dim_multiplier", "block_multiple_of", "max_window_layers", "partial_rotary_factor",
    "rope_theta", "sliding_window_pattern", "vocab_size_per_layer_input",
))  # fmt: skip
# A key that contains one of these words is an option of training.
_TRAINING_WORDS = ("dropout", "pdrop", "loss")
_HARMLESS_PREFIXES = ("_", "mtp_", "unsloth_")
# Keys that are not read, each with the only value that is harmless, also as each element of a list.
_HARMLESS_VALUES: Mapping[str, Any] = {
    "attn_type_list": 1,
    "block_use_swiglu": True,
    "layer_types": "full_attention",
    "moe_layer_freq": 1,
    "mlp_only_layers": None,
    "normalization_function": "rmsnorm",
    "use_grouped_topk": True,
    "use_mrope": False,
    "use_pos_enc": True,
    # Options of generation, with the defaults of transformers. Old versions wrote all of them.
    "diversity_penalty": 0,
    "do_sample": False,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "is_decoder": False,
    "length_penalty": 1,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "pruned_heads": {},
    "remove_invalid_values": False,
    "repetition_penalty": 1,
    "temperature": 1,
    "tf_legacy_loss": False,
    "tie_encoder_decoder": False,
    "top_k": 50,
    "top_p": 1,
    "torchscript": False,
    "typical_p": 1,
    "use_bfloat16": False,
}


def check_unread(
    config: ConfigEntries, ignored: Iterable[str], architecture: str, num_layers: int
) -> None:
    """Check entries that were not read.

    Args:
      config: the entries.
      ignored: keys that change nothing in the family.
      architecture: class of the model in transformers.
      num_layers: number of layers of the model.

    Raises:
      UnsupportedConfigError: an entry changes the computation.
      ValueError: the entry ``per_layer_config`` or ``layer_types`` is invalid.
    """
    unread = config.find_unread() - {*ignored}
    if "layer_types" in unread:
        _check_layer_types(config, num_layers, architecture)
    if "per_layer_config" in unread:
        check_layer_changes(config, num_layers, architecture)
    for key, neutral in _NEUTRAL.items():
        if key in unread and config[key] != neutral:
            raise UnsupportedConfigError(
                f"LlamaConfig: {key} must be {as_json(neutral)} for {architecture}, got "
                f"{as_json(config[key])}."
            )
    warn_of_unread(config, ignored, architecture)


def _check_layer_types(config: Mapping[str, Any], num_layers: int, architecture: str) -> None:
    """Check that all layers are of the usual type."""
    names = read_names(config, "layer_types", num_layers) or ()
    if unsupported := {*names} - {FULL}:
        raise UnsupportedConfigError(
            f"LlamaConfig: layer_types must only contain {FULL!r} for {architecture}, got "
            f"{min(unsupported)!r}."
        )


def warn_of_unread(config: ConfigEntries, known_keys: Iterable[str], architecture: str) -> None:
    """Warn of entries that were not read, unless they are known to change nothing.

    Args:
      config: the entries.
      known_keys: keys that change nothing in the family.
      architecture: class of the model in transformers.
    """
    unread = config.find_unread() - _HARMLESS - {*known_keys}
    warn_of_unknown(
        "config.json",
        (key for key in unread if not _is_harmless(key, config[key])),
        architecture,
    )


def _is_harmless(key: str, value: Any) -> bool:
    if key.startswith(_HARMLESS_PREFIXES) or any(word in key for word in _TRAINING_WORDS):
        return True
    if key not in _HARMLESS_VALUES:
        return False
    values = value if isinstance(value, list) else [value]
    return all(element == _HARMLESS_VALUES[key] for element in values)


def check_layer_changes(config: Mapping[str, Any], num_layers: int, architecture: str) -> None:
    """Check that ``per_layer_config`` changes nothing, see `read_layer_changes`.

    Raises:
      UnsupportedConfigError: it changes a value of a layer.
      ValueError: its content is invalid.
    """
    for layer, values in read_layer_changes(config, num_layers).items():
        raise UnsupportedConfigError(
            "LlamaConfig: per_layer_config must not change values of single layers for "
            f"{architecture}, got {values!r} for layer {layer}."
        )


def read_layer_changes(config: Mapping[str, Any], num_layers: int) -> dict[int, dict[str, Any]]:
    """Return the values in ``per_layer_config`` that differ from the config's own, by layer.

    transformers writes this object for every family. It pads the numbers of layers with zeros, and
    may list all layers.
    """
    changes: dict[int, dict[str, Any]] = {}
    layers = read_object(config, "per_layer_config")
    for key in layers:
        if not str(key).isdecimal() or int(key) >= num_layers:
            raise ValueError(
                f"LlamaConfig: the keys of per_layer_config must be numbers of layers below "
                f"{num_layers}, got {key!r}."
            )
        values = read_object(layers, key, f"per_layer_config of layer {key}")
        changed = {
            name: value
            for name, value in values.items()
            if name not in config or value != config[name]
        }
        if not changed.get("skip", True):
            del changed["skip"]  # an empty list of modules
        if changed:
            changes[int(key)] = changed
    return changes
