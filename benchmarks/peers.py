"""The other CPU engines that our own is measured against, behind one small protocol.

Every peer reads the same Hugging Face folder, gets the same prompts and decodes greedily, one step
a call, so that a caller can interleave our engine and the peers in one run: hosts drift, and only
ratios within one window mean much.

    python benchmarks/peers.py --peer transformers-dynamic --shape 135M --dtype float32 --batch 1

measures one peer in a process of its own, which is the only way to see its own peak memory, and
prints one JSON line.

A peer uses all cores from its own thread pool, whose threads may spin for a moment after a step.
Interleave in runs of several steps and drop the first step of each run (`timed_steps` does), or one
peer pays for another's spinning and for the weights that the other left in the cache. Where other
jobs share the cores, set OMP_WAIT_POLICY=passive before the start: spinning then holds up the very
thread that is waited for, and torch and llama.cpp both lose up to ten times.
"""

import argparse
import ctypes
import importlib
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from bandwidth import num_cores
from safetensors import safe_open
from shapes import DTYPES, SHAPES

PREFILL_LEN = 512
"""Tokens of the prompt whose prefill the command line times."""


class PeerUnavailable(RuntimeError):
    """The packages of a peer are not installed: skip it, and say so."""


class Peer(Protocol):
    """One engine, loaded with one model."""

    name: str
    """What the results call it, with the variant."""

    def start(self, batch: int, prompt_len: int, new_tokens: int) -> None:
        """Prefills `prompt_tokens(batch, prompt_len, ...)`; `step` may follow `new_tokens` times.

        Any sequences from an earlier `start` are dropped.
        """
        ...

    def step(self) -> np.ndarray:
        """Decodes one token for each sequence and returns them on the host, i64[B]."""
        ...

    def prefill(self, prompt_len: int) -> float:
        """Runs a new prompt up to its next token; returns the seconds. Undoes `start`."""
        ...

    def close(self) -> None:
        """Frees the model."""
        ...


def prompt_tokens(batch: int, prompt_len: int, vocab_size: int) -> np.ndarray:
    """Returns the prompts that every peer is given, i64[B, T]: random, the same in each run.

    Example:
        >>> prompt_tokens(2, 3, 100).shape
        (2, 3)
    """
    # From 3: below are the special tokens of most vocabularies.
    return np.random.default_rng(0).integers(3, vocab_size, (batch, prompt_len), dtype=np.int64)


def timed_steps(peer: Peer, num_steps: int, warmup: int = 1) -> list[float]:
    """Returns the seconds of each of `num_steps` steps, after `warmup` untimed ones."""
    for _ in range(warmup):
        peer.step()
    seconds = []
    for _ in range(num_steps):
        start = time.perf_counter()
        peer.step()
        seconds.append(time.perf_counter() - start)
    return seconds


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PeerUnavailable(
            f"peers: {package} must be installed, got {error}. Run `pip install {package}`."
        ) from error


def _read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


class TransformersPeer:
    """Hugging Face transformers on CPU PyTorch, in a hand-written greedy loop.

    The loop calls the model directly: `generate` adds milliseconds of bookkeeping to each step,
    which says nothing about the engine.

    Args:
        folder: a Hugging Face model folder. Nothing is downloaded.
        dtype: a key of `shapes.DTYPES`.
        cache: "dynamic" concatenates K and V at each step; "static" writes into a cache of exactly
            the final length. Which one is faster depends on shape and batch: measure both
            (`variant`) and report the better.
        compile: decode through `torch.compile` (static cache only). The first steps then take a
            minute.

    Raises:
        PeerUnavailable: if torch or transformers is missing.
        ValueError: if the cache is unknown, or compiled and not static.
    """

    def __init__(
        self, folder: str | Path, dtype: str, cache: str = "dynamic", compile: bool = False
    ):
        torch = _import("torch", "torch")
        transformers = _import("transformers", "transformers")
        torch.set_num_threads(num_cores())
        transformers.utils.logging.disable_progress_bar()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=getattr(torch, dtype), local_files_only=True
        ).eval()
        self._setup(torch, transformers, model, cache, compile)

    def _setup(self, torch: Any, transformers: Any, model: Any, cache: str, compile: bool) -> None:
        if cache not in ("dynamic", "static"):
            raise ValueError(
                f"TransformersPeer: cache must be 'dynamic' or 'static', got {cache!r}. "
                "Choose one of these."
            )
        if compile and cache != "static":
            raise ValueError(
                f"TransformersPeer: cache must be 'static' when compiled, got {cache!r}. "
                "A growing cache would compile each step anew."
            )
        self.name = f"transformers ({cache}{', compiled' if compile else ''})"
        self._torch, self._transformers, self._model = torch, transformers, model
        self._cache_kind, self._compile = cache, compile
        self._decode = torch.compile(model) if compile else model

    def variant(self, cache: str, compile: bool = False) -> "TransformersPeer":
        """Returns a peer with another cache on the same weights in memory."""
        peer = object.__new__(TransformersPeer)
        peer._setup(self._torch, self._transformers, self._model, cache, compile)
        return peer

    def _forward(self, model: Any, tokens: Any) -> Any:
        logits = model(
            input_ids=tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        ).logits
        return logits[:, -1].argmax(dim=-1, keepdim=True)

    def _prefill(self, batch: int, prompt_len: int, max_len: int) -> None:
        if self._cache_kind == "static":
            self._cache = self._transformers.StaticCache(
                config=self._model.config, max_cache_len=max_len
            )
        else:
            self._cache = self._transformers.DynamicCache(config=self._model.config)
        prompts = prompt_tokens(batch, prompt_len, self._model.config.vocab_size)
        with self._torch.inference_mode():
            self._tokens = self._forward(self._model, self._torch.from_numpy(prompts))

    def start(self, batch: int, prompt_len: int, new_tokens: int) -> None:
        """See `Peer.start`."""
        self._prefill(batch, prompt_len, prompt_len + new_tokens)

    def step(self) -> np.ndarray:
        """See `Peer.step`."""
        with self._torch.inference_mode():
            self._tokens = self._forward(self._decode, self._tokens)
            return self._tokens[:, 0].numpy()

    def prefill(self, prompt_len: int) -> float:
        """See `Peer.prefill`."""
        start = time.perf_counter()
        self._prefill(1, prompt_len, prompt_len + 1)
        self._tokens.numpy()
        return time.perf_counter() - start

    def close(self) -> None:
        """See `Peer.close`."""
        del self._model, self._decode, self._cache


def _rope_pairs_adjacent(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorders the rows of a Q or K projection, [heads * D, E], to rotate adjacent pairs.

    Hugging Face rotates row i of a head with row i + D/2; llama.cpp's "llama" architecture rotates
    row 2i with 2i + 1.
    """
    halves = weight.reshape(num_heads, 2, -1, weight.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def write_gguf(folder: str | Path, path: str | Path, dtype: str) -> None:
    """Converts a Hugging Face Llama folder into a GGUF file without vocabulary.

    One tensor at a time is in memory, so that the conversion does not raise the peak of the
    process. Norm weights are float32, as llama.cpp requires.

    Raises:
        PeerUnavailable: if gguf is missing.
        ValueError: if the folder holds a tensor that plain Llama does not have.
    """
    gguf = _import("gguf", "gguf")
    folder = Path(folder)
    config = _read_config(folder)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    # The benchmark feeds token ids and takes logits; no text is ever tokenized.
    writer.add_tokenizer_model("none")
    matrix_type = {
        "float32": gguf.GGMLQuantizationType.F32,
        "bfloat16": gguf.GGMLQuantizationType.BF16,
    }[dtype]
    name_map = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    with safe_open(folder / "model.safetensors", "np") as tensors:
        names = list(tensors.keys())
        for name in names:
            target = name_map.get_name(name, try_suffixes=(".weight",))
            if target is None:
                raise ValueError(
                    f"write_gguf: tensors must be those of a plain Llama, got {name}. "
                    "Remove it or use another model."
                )
            shape = tensors.get_slice(name).get_shape()
            is_norm = len(shape) == 1
            numpy_dtype = DTYPES["float32" if is_norm else dtype]
            writer.add_tensor_info(
                target,
                shape,
                numpy_dtype,
                int(np.prod(shape)) * numpy_dtype.itemsize,
                gguf.GGMLQuantizationType.F32 if is_norm else matrix_type,
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name in names:
            tensor = tensors.get_tensor(name)
            tensor = tensor.astype(DTYPES["float32" if tensor.ndim == 1 else dtype])
            if "q_proj" in name:
                tensor = _rope_pairs_adjacent(tensor, heads)
            elif "k_proj" in name:
                tensor = _rope_pairs_adjacent(tensor, kv_heads)
            writer.write_tensor_data(tensor)
    writer.close()


class LlamaCppPeer:
    """llama.cpp through the low-level functions of llama-cpp-python, on the CPU.

    The weights are converted to a GGUF in a temporary folder, in the same dtype; nothing is
    quantised. The argmax is numpy's, over the logits that llama.cpp leaves on the host.

    Args:
        folder: a Hugging Face Llama folder.
        dtype: a key of `shapes.DTYPES`.
        kv_dtype: "float16" (llama.cpp's own default), "bfloat16" or "float32".
        unified: one K and V buffer for all sequences, where each attends over the cells of all and
            masks the others; otherwise a buffer for each sequence, which is llama.cpp's own default
            and the faster one.

    Raises:
        PeerUnavailable: if llama-cpp-python or gguf is missing.
        RuntimeError: if llama.cpp cannot load the model.
    """

    def __init__(
        self,
        folder: str | Path,
        dtype: str,
        kv_dtype: str = "float16",
        unified: bool = False,
    ):
        self._llama = llama = _import("llama_cpp", "llama-cpp-python")
        self.name = f"llama.cpp (kv {kv_dtype}, {'unified' if unified else 'split'})"
        self._kv_type = {"float32": 0, "float16": 1, "bfloat16": 30}[kv_dtype]
        self._unified = unified
        self._vocab_size = _read_config(Path(folder))["vocab_size"]
        # llama.cpp keeps the pointer: the callback must live as long as the library is used.
        self._log = llama.llama_log_callback(lambda level, text, data: None)
        llama.llama_log_set(self._log, ctypes.c_void_p())
        llama.llama_backend_init()
        self._temporary = tempfile.TemporaryDirectory()
        path = Path(self._temporary.name) / "model.gguf"
        write_gguf(folder, path, dtype)
        parameters = llama.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self._model = llama.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            raise RuntimeError(
                f"LlamaCppPeer: {folder} must be a model that llama.cpp reads. "
                "Check that its config is a plain Llama."
            )
        self._context: Any = None
        self._batch: Any = None

    def _open(self, batch: int, max_len: int, max_tokens: int) -> None:
        """Makes a context of `batch` sequences of `max_len`, `max_tokens` in one decode call."""
        llama = self._llama
        self._free()
        parameters = llama.llama_context_default_params()
        parameters.n_ctx = batch * max_len
        parameters.n_batch = max_tokens
        parameters.n_ubatch = min(512, max_tokens)
        parameters.n_seq_max = batch
        parameters.n_threads = parameters.n_threads_batch = num_cores()
        parameters.type_k = parameters.type_v = self._kv_type
        parameters.kv_unified = self._unified
        parameters.no_perf = True
        self._context = llama.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise RuntimeError(
                f"LlamaCppPeer: the context must fit in memory, got {batch} sequences "
                f"of {max_len} tokens. Use fewer or shorter ones."
            )
        self._batch = llama.llama_batch_init(max_tokens, 0, 1)
        as_array = np.ctypeslib.as_array
        self._token = as_array(self._batch.token, (max_tokens,))
        self._position = as_array(self._batch.pos, (max_tokens,))
        self._wants_logits = as_array(self._batch.logits, (max_tokens,))
        as_array(self._batch.n_seq_id, (max_tokens,))[:] = 1

    def _decode(self, tokens: np.ndarray, first_position: int) -> np.ndarray:
        """Runs tokens [B, T], appended to each sequence, and returns each next token, [B]."""
        batch, length = tokens.shape
        count = batch * length
        self._token[:count] = tokens.reshape(-1)
        self._position[:count] = np.tile(np.arange(length) + first_position, batch)
        self._wants_logits[:count] = np.tile(np.arange(length) == length - 1, batch)
        for index in range(count):
            self._batch.seq_id[index][0] = index // length
        self._batch.n_tokens = count
        status = self._llama.llama_decode(self._context, self._batch)
        if status:
            raise RuntimeError(
                f"LlamaCppPeer: llama_decode must return 0, got {status}. "
                "Start with more new_tokens if the context is full (1)."
            )
        logits_BV = np.ctypeslib.as_array(
            self._llama.llama_get_logits(self._context), (batch, self._vocab_size)
        )
        return logits_BV.argmax(axis=-1)

    def start(self, batch: int, prompt_len: int, new_tokens: int) -> None:
        """See `Peer.start`."""
        self._open(batch, prompt_len + new_tokens, batch * prompt_len)
        self._tokens = self._decode(prompt_tokens(batch, prompt_len, self._vocab_size), 0)
        self._length = prompt_len

    def step(self) -> np.ndarray:
        """See `Peer.step`."""
        self._tokens = self._decode(self._tokens[:, None], self._length)
        self._length += 1
        return self._tokens

    def prefill(self, prompt_len: int) -> float:
        """See `Peer.prefill`. The context is made before the clock starts."""
        self._open(1, prompt_len + 1, prompt_len)
        prompts = prompt_tokens(1, prompt_len, self._vocab_size)
        start = time.perf_counter()
        self._decode(prompts, 0)
        return time.perf_counter() - start

    def _free(self) -> None:
        if self._batch is not None:
            self._llama.llama_batch_free(self._batch)
            self._batch = None
        if self._context is not None:
            self._llama.llama_free(self._context)
            self._context = None

    def close(self) -> None:
        """See `Peer.close`."""
        self._free()
        self._llama.llama_model_free(self._model)
        self._temporary.cleanup()


PEERS: dict[str, Callable[[str | Path, str], Peer]] = {
    "transformers-dynamic": lambda folder, dtype: TransformersPeer(folder, dtype, "dynamic"),
    "transformers-static": lambda folder, dtype: TransformersPeer(folder, dtype, "static"),
    "transformers-compiled": lambda folder, dtype: TransformersPeer(folder, dtype, "static", True),
    "llama.cpp": lambda folder, dtype: LlamaCppPeer(folder, dtype),
    "llama.cpp-unified": lambda folder, dtype: LlamaCppPeer(folder, dtype, unified=True),
}
"""Every peer by its name, made from a model folder and a key of `shapes.DTYPES`."""

_PACKAGES = {
    "transformers": {"torch": "torch", "transformers.models.llama": "transformers"},
    "llama.cpp": {"llama_cpp": "llama-cpp-python", "gguf": "gguf"},
}


def resident_bytes() -> tuple[int, int]:
    """Returns the resident memory of this process, now (0 without Linux's /proc) and at its peak.

    Mapped files count: llama.cpp maps its weights.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        # Not at the top: Windows has no such module. macOS counts in bytes, other systems in KiB.
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    # Not ru_maxrss: Linux carries over into it the size of the process that started this one.
    fields = dict(line.split(":", 1) for line in lines)
    now, peak = (int(fields[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
    return now, peak


def measure(
    name: str, folder: str | Path, dtype: str, batch: int, prompt_len: int, new_tokens: int
) -> dict[str, Any]:
    """Measures one peer in this process, which should have done nothing else, for JSON.

    Decoding is timed step by step with `prompt_len` tokens cached at the start; prefill is one
    prompt of 512 tokens, five times after one warm-up. "best" is the shortest time: what the engine
    can do when nothing else runs.

    Raises:
        PeerUnavailable: if the peer's packages are missing.
    """
    packages = next(names for prefix, names in _PACKAGES.items() if name.startswith(prefix))
    for module, package in packages.items():
        _import(module, package)
    after_import, _ = resident_bytes()
    peer = PEERS[name](folder, dtype)
    peer.start(batch, prompt_len, new_tokens + 2)
    steps = timed_steps(peer, new_tokens, warmup=2)
    _, decode_peak = resident_bytes()
    prefills = [peer.prefill(PREFILL_LEN) for _ in range(6)][1:]
    _, peak = resident_bytes()
    peer.close()
    return {
        "peer": peer.name,
        "dtype": dtype,
        "batch": batch,
        "prompt_len": prompt_len,
        "new_tokens": new_tokens,
        "decode_tok_s_median": round(batch / statistics.median(steps), 1),
        "decode_tok_s_best": round(batch / min(steps), 1),
        "prefill_tok_s_median": round(PREFILL_LEN / statistics.median(prefills), 1),
        "prefill_tok_s_best": round(PREFILL_LEN / min(prefills), 1),
        "rss_after_import_mb": after_import // 10**6,
        "peak_rss_decode_mb": decode_peak // 10**6,
        "peak_rss_mb": peak // 10**6,
        "cores": num_cores(),
        "versions": {"python": platform.python_version()}
        | {package: importlib.metadata.version(package) for package in packages.values()},
    }


def main(arguments: list[str] | None = None) -> int:
    """Measures one peer and prints one JSON line: see `--help`."""
    parser = argparse.ArgumentParser(description="Measure one other engine on the CPU.")
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="135M")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="a model folder to use instead of --shape")
    options = parser.parse_args(arguments)
    if options.folder is not None and not (options.folder / "config.json").is_file():
        parser.error(f"--folder must hold a config.json, got {options.folder}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder
        if folder is None:
            folder = Path(temporary) / options.shape
            # In a process of its own: all tensors at once in this one would be its peak.
            subprocess.run(
                [sys.executable, Path(__file__).with_name("shapes.py"), options.shape, folder]
                + ["--dtype", options.dtype],
                check=True,
            )
        try:
            record = measure(
                options.peer,
                folder,
                options.dtype,
                options.batch,
                options.prompt_len,
                options.new_tokens,
            )
        except PeerUnavailable as error:
            print(error, file=sys.stderr)
            return 1
    print(json.dumps({"model": str(options.folder or options.shape)} | record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
