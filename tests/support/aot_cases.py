"""Cases to compile ahead of time, by name, for the scripts and their tests."""

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from paged_jax.models.config import ModelConfig
from tests.support import ROOT
from tests.support.decode_step import (
    LLAMA_3_8B,
    LLAMA_3_70B,
    QWEN_3_1B7,
    SMOLLM2_135M,
    DecodeStep,
    PrefillStep,
)
from tests.support.engine_step import EngineStep
from tests.support.expert_cases import ExpertCase
from tests.support.kernel_cases import Case
from tests.support.model_shapes import (
    DEEPSEEK_V2_LITE,
    GEMMA_3_27B,
    GPT_OSS_20B,
    QWEN_3_5_35B,
    RECURRENT,
    with_layers,
    with_one_of_each,
)
from tests.support.quantised_cases import MODEL_FORMATS, QuantisedCase, QuantisedStep
from tests.support.state_cases import StateCase

# The attention of Llama 3 8B, over contexts of 8192 tokens.
_LLAMA = Case("decode", B=8, T=64, K=8, G=4, C=16, D=128, M=512)
_VARIANTS = {"sliding_window": 1024, "soft_cap": 30.0, "has_sinks": True}


def _gpu(op: str, **changes) -> Case:
    # Offsets in these pools exceed 32 bits.
    sizes = {"backend": "triton", "L": 32, "P": 8192}
    return dataclasses.replace(_LLAMA, op=op, **(sizes | changes))


# Latent attention: of DeepSeek-V2-Lite, V3 (128 heads), GLM-4.7-Flash (20) and Mistral 4.
_LATENT = {"K": 1, "D": 576, "U": 512, "P": 8192}
_MISTRAL_4 = {"K": 1, "G": 32, "D": 320, "U": 256, "P": 16384}

GPU_DECODE: Mapping[str, Case] = {
    "decode": _gpu("decode", B=64),
    "decode of one sequence of 128K": _gpu("decode", B=1, M=8192),
    "decode, blocks of 64": _gpu("decode", C=64, P=2048, M=128),
    "decode, blocks of 8": _gpu("decode", C=8, P=16384, M=1024),
    "decode, group of 1": _gpu("decode", G=1),
    "decode, group of 7": _gpu("decode", K=4, G=7),
    "decode, group of 12": _gpu("decode", G=12),
    # Groups of 71 as in Falcon 7B, and of 1024 as in a common prefix of 256 sequences (Llama 3 8B).
    "decode, group of 71": _gpu("decode", K=1, G=71, D=64, P=65536),
    "decode, group of 1024": _gpu("decode", B=1, G=1024),
    "decode, D 64": _gpu("decode", K=4, G=8, D=64),
    "decode, D 80": _gpu("decode", D=80),
    "decode, D 192": _gpu("decode", D=192),
    "decode, D 256": _gpu("decode", D=256),
    "decode, int8": _gpu("decode", pool_dtype="int8"),
    "decode, fp8": _gpu("decode", pool_dtype="float8_e4m3fn"),
    "decode, float16": _gpu("decode", dtype="float16"),
    "decode, all variants": _gpu("decode", **_VARIANTS),
    "decode, all variants, int8": _gpu("decode", pool_dtype="int8", **_VARIANTS),
    "decode, all variants, fp8": _gpu("decode", pool_dtype="float8_e4m3fn", **_VARIANTS),
    "decode, float32": _gpu("decode", dtype="float32"),
    "decode, latent": _gpu("decode", B=64, G=16, **_LATENT),
    "decode, latent, one sequence of 128K": _gpu("decode", B=1, G=16, M=8192, **_LATENT),
    "decode, latent, group of 20": _gpu("decode", B=64, G=20, **_LATENT),
    "decode, latent, group of 128": _gpu("decode", B=64, G=128, **_LATENT),
    "decode, latent, D 320": _gpu("decode", B=64, **_MISTRAL_4),
    "decode, latent, fp8": _gpu("decode", B=64, G=16, pool_dtype="float8_e4m3fn", **_LATENT),
}

GPU_PREFILL: Mapping[str, Case] = {
    "prefill": _gpu("prefill", B=4, T=512),
    "prefill of one chunk of 2048": _gpu("prefill", B=1, T=2048),
    "prefill of 1 token": _gpu("prefill", T=1),
    "prefill, blocks of 64": _gpu("prefill", C=64, P=2048, M=128),
    "prefill, group of 7": _gpu("prefill", K=4, G=7),
    "prefill, D 64": _gpu("prefill", K=4, G=8, D=64),
    "prefill, D 80": _gpu("prefill", D=80),
    "prefill, D 256": _gpu("prefill", D=256),
    "prefill, int8": _gpu("prefill", pool_dtype="int8"),
    "prefill, fp8": _gpu("prefill", pool_dtype="float8_e4m3fn"),
    "prefill, all variants": _gpu("prefill", **_VARIANTS),
    "prefill, float32": _gpu("prefill", dtype="float32"),
    "prefill, latent": _gpu("prefill", B=4, T=512, G=16, **_LATENT),
    "prefill, latent, group of 128": _gpu("prefill", B=4, T=512, G=128, **_LATENT),
    "prefill, latent, D 320": _gpu("prefill", B=4, T=512, **_MISTRAL_4),
    "prefill, latent, fp8": _gpu("prefill", G=16, pool_dtype="float8_e4m3fn", **_LATENT),
}

# 64 sequences in 2048 rows. `paged_prefill` reads the chunks, `paged_decode` the single tokens.
_SEEN = {"sliding_window": 1024, "soft_cap": 30.0}

GPU_RAGGED: Mapping[str, Case] = {
    "ragged": _gpu("ragged", B=64, T=32),
    "ragged, rows of decode alone": _gpu("ragged", B=64, T=1),
    "ragged, blocks of 64": _gpu("ragged", B=64, T=32, C=64, P=2048, M=128),
    "ragged, group of 7": _gpu("ragged", B=64, T=32, K=4, G=7),
    "ragged, D 64": _gpu("ragged", B=64, T=32, K=4, G=8, D=64),
    "ragged, D 256": _gpu("ragged", B=64, T=32, D=256),
    "ragged, D 80": _gpu("ragged", B=64, T=32, D=80),
    "ragged, int8": _gpu("ragged", B=64, T=32, pool_dtype="int8"),
    "ragged, fp8": _gpu("ragged", B=64, T=32, pool_dtype="float8_e4m3fn"),
    "ragged, all variants": _gpu("ragged", B=64, T=32, **_SEEN),
    "ragged, float32": _gpu("ragged", B=64, T=32, dtype="float32"),
    "ragged, latent": _gpu("ragged", B=64, T=32, G=16, **_LATENT),
}

# The projections of a model return float32.
_PROJECTION = {"dtype": "float32", "pool_dtype": "bfloat16"}

GPU_UPDATES: Mapping[str, Case] = {
    "write of 64 tokens": _gpu("write", B=64, T=1),
    "write of 2048 tokens": _gpu("write", B=1, T=2048),
    "write, D 80": _gpu("write", D=80),
    "write, int8": _gpu("write", pool_dtype="int8"),
    "write, fp8": _gpu("write", pool_dtype="float8_e4m3fn"),
    "write, float32": _gpu("write", dtype="float32"),
    "rope_write of 1 token": _gpu("rope_write", B=1, T=1, **_PROJECTION),
    "rope_write of 64 tokens": _gpu("rope_write", B=64, T=1, **_PROJECTION),
    "rope_write of 2048 tokens": _gpu("rope_write", B=1, T=2048, **_PROJECTION),
    "rope_write, D 64": _gpu("rope_write", B=64, T=1, D=64, K=4, G=8, **_PROJECTION),
    "rope_write, D 80": _gpu("rope_write", B=64, T=1, D=80, **_PROJECTION),
    "rope_write, D 256": _gpu("rope_write", B=64, T=1, D=256, **_PROJECTION),
    "rope_write, norms": _gpu("rope_write", B=64, T=1, has_norms=True, **_PROJECTION),
    "rope_write, norms, int8": _gpu(
        "rope_write", B=64, T=1, has_norms=True, **(_PROJECTION | {"pool_dtype": "int8"})
    ),
    "rope_write, norms, D 80": _gpu("rope_write", B=64, T=1, D=80, has_norms=True, **_PROJECTION),
    "rope_write, fp8": _gpu(
        "rope_write", B=64, T=1, **(_PROJECTION | {"pool_dtype": "float8_e4m3fn"})
    ),
    "rope_write, float32": _gpu("rope_write", B=64, T=1, dtype="float32"),
    "copy_blocks": _gpu("copy_blocks", B=8, T=1),
    "copy_blocks, D 80": _gpu("copy_blocks", B=8, T=1, D=80),
    "copy_blocks, int8": _gpu("copy_blocks", B=8, T=1, pool_dtype="int8"),
    "copy_blocks, fp8": _gpu("copy_blocks", B=8, T=1, pool_dtype="float8_e4m3fn"),
    "write, latent": _gpu("write", B=64, T=1, **_LATENT),
    "copy_blocks, latent": _gpu("copy_blocks", B=8, T=1, **_LATENT),
}

# Calls to compile for other GPUs: one of each kind, and the heads with the largest memory use.
GPU_OTHERS: Mapping[str, Case] = {
    name: cases[name]
    for cases, names in (
        (GPU_DECODE, ("decode", "decode, D 64", "decode, D 256", "decode, group of 1024")),
        (GPU_PREFILL, ("prefill", "prefill, D 64", "prefill, D 256")),
        (GPU_RAGGED, ("ragged", "ragged, D 256")),
        (GPU_UPDATES, ("write of 64 tokens", "rope_write of 64 tokens", "copy_blocks")),
    )
    for name in names
}


def _mosaic(cases: Mapping[str, Case], *names: str) -> dict[str, Case]:
    """Return calls of Triton's cases for the backend `mosaic_gpu`, under other names."""
    return {
        f"mosaic: {name}": dataclasses.replace(cases[name], backend="mosaic_gpu") for name in names
    }


MOSAIC_DECODE: Mapping[str, Case] = _mosaic(
    GPU_DECODE,
    "decode", "decode of one sequence of 128K", "decode, blocks of 64", "decode, blocks of 8",
    "decode, group of 1", "decode, group of 7", "decode, group of 12", "decode, D 64",
    "decode, D 192", "decode, D 256", "decode, float16", "decode, all variants", "decode, latent",
    "decode, int8", "decode, fp8", "decode, latent, fp8",
)  # fmt: skip

# Prompts, for compute capability 9.0.
MOSAIC_PREFILL: Mapping[str, Case] = _mosaic(
    GPU_PREFILL,
    "prefill of one chunk of 2048", "prefill, blocks of 64", "prefill, group of 7", "prefill, D 64",
    "prefill, D 256", "prefill, all variants", "prefill, int8", "prefill, fp8", "prefill, latent",
    "prefill, latent, group of 128", "prefill, latent, D 320",
) | {
    f"mosaic: prefill, {name}": _gpu("prefill", backend="mosaic_gpu", **changes)
    for name, changes in (
        ("int8, D 64", {"K": 4, "G": 8, "D": 64, "pool_dtype": "int8"}),
        ("int8, D 192", {"D": 192, "pool_dtype": "int8"}),
        ("fp8, D 256", {"D": 256, "pool_dtype": "float8_e4m3fn"}),
        ("int8, D 256", {"D": 256, "pool_dtype": "int8"}),
        ("int8, float16", {"dtype": "float16", "pool_dtype": "int8"}),
        ("fp8, all variants", {"pool_dtype": "float8_e4m3fn", **_VARIANTS}),
        ("latent, all variants", {"G": 20, **_LATENT, **_VARIANTS}),
    )
}  # fmt: skip
MOSAIC_RAGGED: Mapping[str, Case] = _mosaic(
    GPU_RAGGED, "ragged", "ragged, all variants", "ragged, int8", "ragged, fp8", "ragged, latent"
)

MOSAIC_UPDATES: Mapping[str, Case] = _mosaic(
    GPU_UPDATES,
    "write of 64 tokens", "write, D 80", "write, float32", "write, latent",
    "rope_write of 64 tokens", "rope_write, D 64", "rope_write, D 256", "rope_write, norms",
    "rope_write, float32", "copy_blocks", "copy_blocks, D 80", "copy_blocks, int8",
    "copy_blocks, latent", "copy_blocks, fp8", "write, int8", "write, fp8",
    "rope_write, norms, int8", "rope_write, fp8",
)  # fmt: skip

# Calls with ``backend=None``, for GPUs without Triton.
GPU_XLA: Mapping[str, Case] = {
    "decode by XLA": _gpu("decode", backend=None, L=1),
    "prefill by XLA": _gpu("prefill", backend=None, L=1),
    "write by XLA": _gpu("write", backend=None, L=1),
}

_Step = TypeVar("_Step", DecodeStep, EngineStep)


def _layers_of(
    config: ModelConfig,
    step: type[_Step],
    *,
    num_layers: int = 2,  # with every kernel of the complete models
    pool_gigabytes: float = 2,
    **changes,
) -> _Step:
    config = with_layers(config, num_layers)
    return step(config, pool_gigabytes=pool_gigabytes, scan_layers=False, **changes)


GPU_STEPS: Mapping[str, DecodeStep | EngineStep] = {
    "step of Llama 3 8B": DecodeStep(LLAMA_3_8B, pool_gigabytes=40, scan_layers=False),
    # Pools that fill a GPU with 141 GB; the weights of 4 layers take 3 GB.
    "engine with full pools": _layers_of(LLAMA_3_8B, EngineStep, num_layers=4, pool_gigabytes=110),
    "step, products undivided": _layers_of(LLAMA_3_8B, DecodeStep, num_layers=4),
    "step, int8": _layers_of(LLAMA_3_8B, DecodeStep, pool_dtype="int8"),
    "step, fp8": _layers_of(LLAMA_3_8B, DecodeStep, pool_dtype="float8_e4m3fn"),
    "step of SmolLM2 135M": _layers_of(SMOLLM2_135M, DecodeStep),
    "step of SmolLM2 135M, int8": _layers_of(SMOLLM2_135M, DecodeStep, pool_dtype="int8"),
    "step of SmolLM2 135M, fp8": _layers_of(SMOLLM2_135M, DecodeStep, pool_dtype="float8_e4m3fn"),
    "chunk of Llama 3 8B": _layers_of(LLAMA_3_8B, PrefillStep, batch=1),
    "chunk, int8": _layers_of(LLAMA_3_8B, PrefillStep, batch=1, pool_dtype="int8"),
    "chunk, fp8": _layers_of(LLAMA_3_8B, PrefillStep, batch=1, pool_dtype="float8_e4m3fn"),
    "chunk of SmolLM2 135M": _layers_of(SMOLLM2_135M, PrefillStep, batch=1),
    "chunk of SmolLM2 135M, int8": _layers_of(
        SMOLLM2_135M, PrefillStep, batch=1, pool_dtype="int8"
    ),
    "chunk of SmolLM2 135M, fp8": _layers_of(
        SMOLLM2_135M, PrefillStep, batch=1, pool_dtype="float8_e4m3fn"
    ),
}

# Steps with all kernels of the backend.
MOSAIC_STEPS: Mapping[str, DecodeStep | EngineStep] = {
    "mosaic: step of Llama 3 8B": _layers_of(LLAMA_3_8B, DecodeStep, backend="mosaic_gpu"),
    "mosaic: chunk of Llama 3 8B": _layers_of(
        LLAMA_3_8B, PrefillStep, batch=1, backend="mosaic_gpu"
    ),
    "mosaic: step, int8": _layers_of(
        LLAMA_3_8B, DecodeStep, pool_dtype="int8", backend="mosaic_gpu"
    ),
    "mosaic: chunk, int8": _layers_of(
        LLAMA_3_8B, PrefillStep, batch=1, pool_dtype="int8", backend="mosaic_gpu"
    ),
    "mosaic: latent chunk of DeepSeek V2 Lite": EngineStep(
        with_layers(DEEPSEEK_V2_LITE, 2), 30, max_model_len=32768, program="prefill",
        backend="mosaic_gpu",
    ),
}  # fmt: skip

# A single sequence: XLA computes its matrix multiplications without tensor cores, so launches
# dominate.
GPU_SINGLE: Mapping[str, DecodeStep] = {
    "step of one sequence": _layers_of(SMOLLM2_135M, DecodeStep, num_layers=4, batch=1),
}

# Programs of several devices; the size of the pools is per device.
GPU_PARALLEL: Mapping[str, EngineStep] = {
    "parallel step of Llama 3 8B": EngineStep(
        dataclasses.replace(LLAMA_3_8B, num_hidden_layers=4),
        pool_gigabytes=40,
        scan_layers=False,
        num_devices=2,
        topology="1x2x1",
    ),
}

# Steps of recurrent layers: Qwen3.5-35B-A3B, Kimi-Linear, OLMo Hybrid, and Nemotron 3 Nano.
STATES: Mapping[str, StateCase] = {
    "states, delta rule": StateCase("delta"),
    "states, delta rule of one sequence": StateCase("delta", B=1),
    "states, delta rule by element": StateCase("delta", K=32, G=1, by_element=True),
    "states, delta rule, D 96": StateCase("delta", K=30, G=1, D=96, U=192),
    "states, Mamba-2": StateCase("state_space", K=8, G=8, U=64),
    "states, convolution": StateCase("convolution", D=4, U=8192, dtype="bfloat16"),
}

# States of Falcon-H1, with rows of two vector registers.
WIDE_STATES: Mapping[str, StateCase] = {
    "states by XLA, 256 lanes": StateCase("state_space", K=1, G=24, D=256, backend="xla"),
    "states by XLA, 256 lanes, of 8 sequences": StateCase(
        "state_space", B=8, K=1, G=24, D=256, backend="xla"
    ),
}

# gpt-oss, with sizes that are not multiples of 128, Qwen3-30B-A3B, and Mixtral.
EXPERTS: Mapping[str, ExpertCase] = {
    **{
        f"experts of gpt-oss, {tokens} tokens": ExpertCase(tokens, 32, 4, 2880, 2880)
        for tokens in (1, 8, 64, 512)
    },
    "experts of Qwen3, 8 tokens": ExpertCase(8, 128, 8, 2048, 768),
    "experts of Mixtral, 512 tokens": ExpertCase(512, 8, 2, 4096, 14336),
    "experts, float32": ExpertCase(8, 32, 4, 2048, 1024, dtype="float32"),
}

QUANTISED: Mapping[str, QuantisedCase] = {
    f"{name}, {num_rows} rows": QuantisedCase(format, num_rows)
    for name, format in MODEL_FORMATS.items()
    for num_rows in ((1, 8, 16, 32, 64, 128, 2048) if name == "q4_0" else (8, 64, 128, 2048))
}

# Steps of two layers.
QUANTISED_STEPS: Mapping[str, QuantisedStep] = {
    f"step in {name}": QuantisedStep(
        dataclasses.replace(LLAMA_3_8B, num_hidden_layers=2),
        pool_gigabytes=2,
        batch=8,
        format=MODEL_FORMATS[name],
    )
    for name in ("int4 in groups of 128", "q4_0", "fp8 in blocks of 128", "q8_0", "int8 of a row")
}

QUANTISED_EXPERTS: Mapping[str, ExpertCase] = {
    f"experts in mxfp4, {tokens} tokens": ExpertCase(
        tokens, 32, 4, 2880, 2880, format=MODEL_FORMATS["mxfp4"]
    )
    for tokens in (1, 8, 64, 512)
}

# Engines with pools that fill a GPU: layers without and with a window.
# The first layer has a dense MLP, and the second has experts.
GPU_LATENT: Mapping[str, EngineStep] = {
    "latent step of DeepSeek V2 Lite": EngineStep(
        with_layers(DEEPSEEK_V2_LITE, 2), 30, max_model_len=32768
    ),
}

# Three recurrent layers and an attention layer. The weights of the complete model take 70 GB.
GPU_RECURRENT: Mapping[str, EngineStep] = {
    "recurrent step of Qwen3.5 35B": EngineStep(
        with_layers(QWEN_3_5_35B, 4), 50, max_model_len=32768
    ),
}

# All layers.
GPU_COMPLETE: Mapping[str, EngineStep] = {
    "complete step of Qwen3.5 35B": EngineStep(QWEN_3_5_35B, 50, max_model_len=32768),
    "complete step of DeepSeek V2 Lite": EngineStep(DEEPSEEK_V2_LITE, 90, max_model_len=32768),
}

GPU_FAMILIES: Mapping[str, EngineStep] = {
    "families: Gemma 3 27B": EngineStep(with_one_of_each(GEMMA_3_27B), 110, max_model_len=32768),
    "families: gpt-oss 20B": EngineStep(with_one_of_each(GPT_OSS_20B), 110, max_model_len=32768),
}

# Without a GPU for autotuning, XLA splits matrix multiplications with few rows (split-K). Each
# split adds a kernel that sums the parts.
GPU_COMPILER_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "step, products undivided": {"xla_gpu_experimental_force_split_k": 1},
}

GPU_CASES: Mapping[
    str, Case | ExpertCase | QuantisedCase | StateCase | DecodeStep | EngineStep
] = {
    **STATES, **QUANTISED, **QUANTISED_STEPS, **QUANTISED_EXPERTS, **EXPERTS,
    **GPU_DECODE, **GPU_PREFILL, **GPU_RAGGED, **GPU_UPDATES,
    **MOSAIC_DECODE, **MOSAIC_PREFILL, **MOSAIC_RAGGED, **MOSAIC_UPDATES, **GPU_XLA,
    **MOSAIC_STEPS,
    **GPU_STEPS, **GPU_SINGLE, **GPU_PARALLEL, **GPU_FAMILIES, **GPU_LATENT, **GPU_RECURRENT,
    **GPU_COMPLETE,
}  # fmt: skip


# Calls with tests of their instructions, by loop or around atomic additions.
GPU_LISTED = frozenset(
    {
        "decode", "decode of one sequence of 128K", "decode, int8", "decode, fp8",
        "prefill of one chunk of 2048", "mosaic: decode", "mosaic: decode of one sequence of 128K",
        "mosaic: decode, int8", "mosaic: decode, fp8", "mosaic: prefill of one chunk of 2048",
        "mosaic: prefill, int8", "mosaic: prefill, fp8", "mosaic: prefill, latent",
        *(name for name in QUANTISED if name.endswith(", 8 rows")),
    }
)  # fmt: skip


def _tpu(op: str, **changes) -> Case:
    # Pools of 2.1 GB, so that a copy of a pool is visible.
    sizes = {"backend": "mosaic_tpu", "L": 8, "P": 4096}
    return dataclasses.replace(_LLAMA, op=op, **(sizes | changes))


TPU_ATTENTION: Mapping[str, Case] = {
    "decode": _tpu("decode", B=64),
    "decode of one sequence of 128K": _tpu("decode", B=1, M=8192),
    "decode, blocks of 64": _tpu("decode", C=64, P=1024, M=128),
    "decode, blocks of 128": _tpu("decode", C=128, P=512, M=64),
    "decode, group of 1": _tpu("decode", G=1),
    "decode, group of 7": _tpu("decode", K=4, G=7),
    "decode, D 64 in 128 lanes": _tpu("decode", K=4, G=8, D=64, lanes=128),
    "decode, D 80 in 128 lanes": _tpu("decode", D=80, lanes=128),
    "decode, D 256": _tpu("decode", D=256),
    "decode, int8": _tpu("decode", pool_dtype="int8"),
    "decode, fp8": _tpu("decode", pool_dtype="float8_e4m3fn"),
    "decode, all variants": _tpu("decode", **_VARIANTS),
    "decode, float32": _tpu("decode", dtype="float32"),
    "prefill": _tpu("prefill", B=4, T=512),
    "prefill of one chunk of 2048": _tpu("prefill", B=1, T=2048),
    "prefill of 1 token": _tpu("prefill", T=1),
    "prefill, blocks of 64": _tpu("prefill", C=64, P=1024, M=128),
    "prefill, group of 7": _tpu("prefill", K=4, G=7),
    "prefill, D 64 in 128 lanes": _tpu("prefill", K=4, G=8, D=64, lanes=128),
    "prefill, D 256": _tpu("prefill", D=256),
    "prefill, int8": _tpu("prefill", pool_dtype="int8"),
    "prefill, fp8": _tpu("prefill", pool_dtype="float8_e4m3fn"),
    "prefill, all variants": _tpu("prefill", **_VARIANTS),
    "prefill, float32": _tpu("prefill", dtype="float32"),
}

TPU_RAGGED: Mapping[str, Case] = {
    "ragged": _tpu("ragged", B=64, T=32),
    "ragged, rows of decode alone": _tpu("ragged", B=64, T=1),
    "ragged, one chunk of 2048": _tpu("ragged", B=1, T=2048),
    "ragged, one KV head": _tpu("ragged", B=64, T=32, K=1, G=8, P=32768),
    "ragged, blocks of 128": _tpu("ragged", B=64, T=32, C=128, P=512, M=64),
    "ragged, group of 1": _tpu("ragged", B=64, T=32, K=16, G=1, P=2048),
    "ragged, fp8": _tpu("ragged", B=64, T=32, pool_dtype="float8_e4m3fn"),
    "ragged, all variants": _tpu("ragged", B=64, T=32, **_SEEN),
    "ragged, float32": _tpu("ragged", B=64, T=32, dtype="float32"),
    "ragged, float32 over bfloat16": _tpu(
        "ragged", B=64, T=32, dtype="float32", pool_dtype="bfloat16"
    ),
}

# XLA writes pools of quantised dtypes, and copies blocks, also in place.
TPU_UPDATES: Mapping[str, Case] = {
    "write of 64 tokens": _tpu("write", backend=None, B=64, T=1),
    "write of 2048 tokens": _tpu("write", backend=None, B=1, T=2048),
    "write, D 64 in 128 lanes": _tpu("write", backend=None, D=64, lanes=128),
    "write, float32": _tpu("write", backend=None, dtype="float32"),
    "write, latent in 640 lanes": _tpu("write", backend=None, B=64, T=1, lanes=640, **_LATENT),
    "rope_write of 64 tokens": _tpu("rope_write", backend=None, B=64, T=1, **_PROJECTION),
    "write, int8": _tpu("write", backend=None, pool_dtype="int8"),
    "copy_blocks": _tpu("copy_blocks", backend=None, B=8, T=1),
    "copy_blocks, int8": _tpu("copy_blocks", backend=None, B=8, T=1, pool_dtype="int8"),
}

# The bfloat16 weights of 8B alone fill the 16 GB of a v5e; a v6e has 32 GB.
TPU_STEPS: Mapping[str, Mapping[str, DecodeStep]] = {
    "v5e": {
        "step of Qwen 3 1.7B": DecodeStep(QWEN_3_1B7, pool_gigabytes=8),
        "chunk of Qwen 3 1.7B": PrefillStep(QWEN_3_1B7, pool_gigabytes=8, batch=1),
        **{
            f"{name} of Qwen 3 1.7B, {kind}": step(
                QWEN_3_1B7,
                pool_gigabytes=8,
                # With fewer tokens the scales do not fill a register, and XLA changes their layout.
                block_size=128,
                max_blocks_per_slot=64,
                batch=batch,
                pool_dtype=pool_dtype,
            )
            for kind, pool_dtype in (("int8", "int8"), ("fp8", "float8_e4m3fn"))
            for name, step, batch in (("step", DecodeStep, 64), ("chunk", PrefillStep, 1))
        },
    },
    "v6e": {"step of Llama 3 8B": DecodeStep(LLAMA_3_8B, pool_gigabytes=12)},
}

# 70B in bfloat16 does not fit on eight chips of 16 GB, and sixteen are more than its KV heads. Few
# sequences, because sampling for 64 sequences takes 242 MB on every chip (jax 0.12.0.1).
TPU_PARALLEL: Mapping[str, Mapping[str, EngineStep]] = {
    "v5e": {
        "parallel step of Llama 3 70B": EngineStep(
            LLAMA_3_70B,
            pool_gigabytes=5,
            batch=8,
            block_size=128,
            scan_layers=True,
            num_devices=16,
            topology="v5e:4x4",
        )
    },
    "v6e": {
        "parallel step of Llama 3 8B": EngineStep(
            LLAMA_3_8B,
            pool_gigabytes=26,
            batch=32,
            scan_layers=True,
            num_devices=4,
            topology="v6e:2x2",
        )
    },
}

# One KV head per chip, and a KV head that two chips share, with a head dimension of half the lanes.
# The chips divide the experts.
TPU_FAMILIES: Mapping[str, Mapping[str, EngineStep]] = {
    "v5e": {
        f"families: {name}": EngineStep(
            with_one_of_each(config),
            pool_gigabytes=12,
            batch=8,
            block_size=128,
            max_model_len=32768,
            num_devices=16,
            topology="v5e:4x4",
        )
        for name, config in (("Gemma 3 27B", GEMMA_3_27B), ("gpt-oss 20B", GPT_OSS_20B))
    },
    "v6e": {},
}

# Models with states of recurrent layers, and with latent attention, on 16 chips.
TPU_STATES: Mapping[str, Mapping[str, EngineStep]] = {
    "v5e": {
        f"{kind} step of {name}": EngineStep(
            with_layers(config, num_layers),
            pool_gigabytes=8,
            batch=8,
            block_size=128,
            max_model_len=32768,
            num_devices=16,
            topology="v5e:4x4",
            num_states=num_states,
        )
        for kind, name, config, num_layers, num_states in (
            ("recurrent", "Qwen3.5 35B", QWEN_3_5_35B, 4, 8192),
            ("latent", "DeepSeek V2 Lite", DEEPSEEK_V2_LITE, 2, None),
        )
    },
    "v6e": {},
}

# Recurrent layers on a chip, with states that fill no whole tiles. States take half of the pools.
TPU_RECURRENT: Mapping[str, EngineStep] = {
    f"states of {name}": EngineStep(
        config,
        pool_gigabytes=12,
        batch=8,
        block_size=128,
        num_states=6 * 10**9 // (2 * sum(group.num_state_values for group in config.state_groups)),
    )
    for name, config in RECURRENT.items()
    if name.startswith(("Kimi", "LFM2", "Nemotron", "OLMo"))
}

# Layers are not stacked: XLA copies 8-bit matrices out of a stack (v6e, fp8 in blocks: 558 MB).
TPU_QUANTISED_STEPS: Mapping[str, QuantisedStep] = {
    name: dataclasses.replace(step, block_size=128, max_blocks_per_slot=64)
    for name, step in QUANTISED_STEPS.items()
}

_TPU_USUAL: Mapping[str, Case] = {
    **{
        name: TPU_ATTENTION[name]
        for name in (
            "decode", "decode, D 64 in 128 lanes", "decode, D 256",
            "prefill", "prefill, D 64 in 128 lanes", "prefill, D 256",
        )
    },
    "ragged": TPU_RAGGED["ragged"],
    "write of 64 tokens": TPU_UPDATES["write of 64 tokens"],
}  # fmt: skip

# Calls to compile for other generations. A v4 has no kernel for attention over pools.
TPU_OTHERS: Mapping[str, Mapping[str, Case | QuantisedCase | DecodeStep]] = {
    "v4": {
        "decode by XLA": _tpu("decode", backend=None, L=1),
        "prefill by XLA": _tpu("prefill", backend=None, L=1, T=16),
        "write of 64 tokens": TPU_UPDATES["write of 64 tokens"],
    },
    "v5p": {**_TPU_USUAL, "step of Qwen 3 1.7B": DecodeStep(QWEN_3_1B7, pool_gigabytes=8)},
    # Unstacked layers, as they are loaded on this device; otherwise all weights would change their
    # layout.
    "7x": {**_TPU_USUAL, "step of 4 layers": _layers_of(
        QWEN_3_1B7, DecodeStep, num_layers=4, pool_gigabytes=8
    )},
}  # fmt: skip

TPU_CASES: Mapping[
    str, Mapping[str, Case | ExpertCase | QuantisedCase | DecodeStep | EngineStep]
] = {
    generation: {
        **QUANTISED,
        **TPU_QUANTISED_STEPS,
        **EXPERTS,
        **TPU_ATTENTION,
        **TPU_RAGGED,
        **TPU_UPDATES,
        **STATES,
        **WIDE_STATES,
        **steps,
        **TPU_PARALLEL[generation],
        **TPU_FAMILIES[generation],
        **TPU_STATES[generation],
        **TPU_RECURRENT,
    }  # fmt: skip
    for generation, steps in TPU_STEPS.items()
} | TPU_OTHERS

# Number of programs of this process with a result that was stored, compiled, or verified.
COUNTS: Counter[str] = Counter()


def has_gpu_compiler() -> bool:
    """Return whether XLA can compile for GPUs here."""
    names = ("xla_cuda12", "xla_cuda13")
    return importlib.util.find_spec("jax_plugins") is not None and any(
        importlib.util.find_spec(f"jax_plugins.{name}") for name in names
    )


def parameters(cases: Mapping[str, Any]) -> list[Any]:
    """Return pytest parameters for the names of cases.

    Calls that differ from others only in the head dimension and block size are slow tests: the
    quick tests show whether a version of JAX compiles the kernels for all dtypes and variants.
    """
    sizes = (_LLAMA.C, _LLAMA.D, _LLAMA.G)
    return [
        pytest.param(name, marks=pytest.mark.slow)
        if isinstance(case, Case) and (case.C, case.D, case.G) != sizes
        else name
        for name, case in cases.items()
    ]


def asked_for(request: pytest.FixtureRequest, what: str) -> set[str]:
    """Return the values of a parameter in the selected tests of a file, to compile only these."""
    return {params[what] for params in _selected(request) if what in params}


def _selected(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Return the parameters of the selected tests of a file."""
    items = [item for item in request.session.items if item.path == request.path]
    return [item.callspec.params for item in items if hasattr(item, "callspec")]


def compile_for_gpus(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Return the results of ``aot_gpu`` by GPU and case, for the selected tests of a file.

    The tests have parameters ``name`` and ``target``. Each GPU gets the cases of its tests: steps
    for one GPU may have instructions that another lacks. Two compile at the same time.
    """
    asked: dict[str, set[str]] = {}
    for params in _selected(request):
        asked.setdefault(params["target"], set()).add(params["name"])

    def compile_for(target: str) -> dict[str, Any]:
        return run_script("aot_gpu", f"--gpu={target}", *exactly(asked[target]))

    with ThreadPoolExecutor(2) as threads:
        return dict(zip(asked, threads.map(compile_for, asked), strict=True))


def chosen(cases: Mapping[str, Any], arguments: Sequence[str]) -> list[str]:
    """Return the names that match one of the regular expressions of a script, or all names."""
    pattern = re.compile("|".join(arguments))
    return [name for name in cases if pattern.match(name)]


def exactly(names: Iterable[str]) -> list[str]:
    """Return regular expressions that match exactly these names."""
    return [f"{re.escape(name)}$" for name in names]


def run_script(script: str, *arguments: str) -> dict[str, Any]:
    """Return the output of ``aot_gpu`` or ``aot_tpu`` for each case, by name."""
    command = [sys.executable, "-m", f"tests.support.{script}", *arguments]
    # Ten times the usual duration on two cores, in case the compiler hangs.
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    COUNTS.update(document["counts"])
    return document["cases"]


def compiled(results: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the output of a script for a case, and check that it compiled."""
    if "error" in results[name]:
        pytest.fail(f"{name} does not compile:\n{results[name]['error']}")
    return results[name]
