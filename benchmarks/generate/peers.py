"""CPU engines behind a small protocol: paged_jax and the engines that it is compared with.

Every peer reads the same Hugging Face folder, gets the same prompts and decodes greedily, one step
per call. A caller can therefore interleave paged_jax and the peers in one run. The speed of hosts
changes over time, so only ratios within a short period are meaningful.

    python -m benchmarks.generate.peers --peer transformers-dynamic --dtype float32 --batch 1

measures one peer in a separate process, which is necessary to measure its peak memory, and prints
one JSON line.

A peer uses all cores through its own thread pool, and its threads may spin for a moment after a
step. Interleave runs of several steps and drop the first step of each run, as `timed_steps` does.
Otherwise a peer suffers from the spinning threads of another peer, and from its weights in the
cache. If other jobs share the cores, set OMP_WAIT_POLICY=passive before the start. Otherwise a
spinning thread can block the thread that it waits for, and torch and llama.cpp can become ten times
slower.
"""

import argparse
import contextlib
import ctypes
import gc
import importlib.metadata
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors import safe_open

from benchmarks import harness
from benchmarks.common.bandwidth import num_cores
from benchmarks.common.shapes import DTYPES, SHAPES
from benchmarks.harness import PeerUnavailable

PREFILL_LEN = 512
"""Number of prompt tokens in the prefill measurement of the command line."""

TURN = 8
"""Number of consecutive steps of an engine in a turn."""


class Peer(Protocol):
    """An engine with a loaded model."""

    name: str
    """Name in the results, with the variant."""

    def start(self, batch: int, prompt_len: int, new_tokens: int) -> None:
        """Prefill `prompt_tokens(batch, prompt_len, ...)`, for up to `new_tokens` steps.

        Sequences from an earlier `start` are dropped.
        """
        ...

    def step(self) -> np.ndarray:
        """Decode one token for each sequence and return the tokens on the host, i64[B]."""
        ...

    def prefill(self, prompt_len: int) -> float:
        """Return the seconds to compute the next token of a new prompt."""
        ...

    def close(self) -> None:
        """Free the model."""
        ...


def prompt_tokens(batch: int, prompt_len: int, vocab_size: int) -> np.ndarray:
    """Return the prompts for every peer, i64[B, T]: random, and the same in each run.

    Example:
        >>> prompt_tokens(2, 3, 100).shape
        (2, 3)
    """
    # From 3, because most vocabularies have their special tokens below.
    return np.random.default_rng(0).integers(3, vocab_size, (batch, prompt_len), dtype=np.int64)


def timed_steps(peer: Peer, num_steps: int, warmup: int = 1) -> list[float]:
    """Return the seconds of each of `num_steps` steps, after `warmup` untimed steps."""
    for _ in range(warmup):
        peer.step()
    return [harness.elapsed(peer.step) for _ in range(num_steps)]


def step_seconds(engines: Mapping[str, Any], num_turns: int) -> dict[str, float]:
    """Return the median seconds of a step of each started engine, in turns of TURN steps."""
    runs = {name: partial(timed_steps, each, TURN - 1) for name, each in engines.items()}
    return harness.medians(
        {n: chain.from_iterable(s) for n, s in harness.take_turns(runs, num_turns).items()}
    )


def prefill_rates(engines: Mapping[str, Peer], num_turns: int) -> dict[str, float]:
    """Return the prompt tokens per second of each engine, measured in turns.

    The first call compiles and warms up, and is not measured.
    """
    runs = {name: partial(each.prefill, PREFILL_LEN) for name, each in engines.items()}
    seconds = harness.medians(
        {name: s[1:] for name, s in harness.take_turns(runs, num_turns + 1).items()}
    )
    return {name: round(PREFILL_LEN / taken, 1) for name, taken in seconds.items()}


class PagedJax:
    """paged_jax behind the protocol of the peers, through `LLM.stream`.

    Args:
        model: a model folder or file.
        dtype: see `EngineConfig`.
        batch: maximum number of sequences.
        max_len: maximum number of tokens in a sequence.
        num_blocks: blocks of 16 tokens; None for enough for all sequences of the maximum length.
        options: further options of `EngineConfig`.
    """

    name = "paged_jax"

    def __init__(
        self,
        model: Path,
        dtype: str,
        *,
        batch: int,
        max_len: int,
        num_blocks: int | None = None,
        **options: Any,
    ):
        # Imported here, because other engines are measured without the imports of paged_jax.
        from paged_jax import LLM, SamplingParams

        self._llm = LLM(
            model,
            dtype=dtype,
            max_num_seqs=batch,
            max_model_len=max_len,
            num_blocks=num_blocks or batch * -(-max_len // 16),
            # Like the peers: one step at a time, and every prompt is computed.
            steps_per_dispatch=1,
            enable_prefix_caching=False,
            **options,
        )
        self._stream = self._llm.stream([], SamplingParams())

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""
        return sum(leaf.nbytes for leaf in self._llm.weights)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the K and V pools."""
        return self._llm.cache.nbytes

    def start(self, batch: int, prompt_len: int, new_tokens: int) -> None:
        """See `Peer.start`."""
        self._stream.close()
        from paged_jax import SamplingParams

        # One token more, because the first token is generated here.
        params = SamplingParams(temperature=0, max_tokens=new_tokens + 1, ignore_eos=True)
        prompts = prompt_tokens(batch, prompt_len, self._llm.config.vocab_size).tolist()
        self._batch = batch
        self._stream = self._llm.stream([{"prompt_token_ids": ids} for ids in prompts], params)
        self.step()

    def step(self) -> np.ndarray:
        """See `Peer.step`. Every sequence of the batch yields one token."""
        outputs = dict(next(self._stream) for _ in range(self._batch))
        return np.array([outputs[row].outputs[0].token_ids[-1] for row in range(self._batch)])

    def prefill(self, prompt_len: int) -> float:
        """See `Peer.prefill`."""
        return harness.elapsed(lambda: self.start(1, prompt_len, 1))

    def close(self) -> None:
        """See `Peer.close`."""
        self._stream.close()
        del self._stream, self._llm
        gc.collect()


class TransformersPeer:
    """Hugging Face transformers on CPU PyTorch, in a custom greedy loop.

    The loop calls the model directly, because `generate` adds milliseconds of bookkeeping to each
    step.

    Args:
        folder: a Hugging Face model folder. Nothing is downloaded.
        dtype: a key of `shapes.DTYPES`.
        cache: "dynamic" concatenates K and V at each step; "static" writes into a cache of exactly
            the final length. Shape and batch determine which is faster: measure both
            (`variant`) and report the better figure.
        compile: whether to decode through `torch.compile` (static cache only). The first steps then
            take a minute.

    Raises:
        PeerUnavailable: if torch or transformers is missing.
        ValueError: if the cache is unknown, or `compile` is set without a static cache.
    """

    def __init__(
        self, folder: str | Path, dtype: str, cache: str = "dynamic", compile: bool = False
    ):
        torch = harness.import_peer("torch", "torch")
        transformers = harness.import_peer("transformers", "transformers")
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
                "A growing cache would compile every step again."
            )
        self.name = f"transformers ({cache}{', compiled' if compile else ''})"
        self._torch, self._transformers, self._model = torch, transformers, model
        self._cache_kind, self._compile = cache, compile
        self._decode = torch.compile(model) if compile else model

    def variant(self, cache: str, compile: bool = False) -> "TransformersPeer":
        """Return a peer with another cache and the same weights in memory."""
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


class LlamaCppPeer:
    """llama.cpp on the CPU, through the low-level functions of llama-cpp-python.

    The weights of a folder are converted to a temporary GGUF file, in the same dtype, without
    quantisation. NumPy computes the argmax of the logits that llama.cpp returns to the host.

    Args:
        path: a Hugging Face Llama folder, or a GGUF file.
        dtype: a key of `shapes.DTYPES`; ignored for a GGUF file.
        kv_dtype: "float16" (the default of llama.cpp), "bfloat16" or "float32".
        unified: whether all sequences share one K and V buffer. Each sequence then attends over the
            cells of all sequences and masks the others. If False, each sequence has a separate
            buffer, which is faster and the default of llama.cpp.

    Raises:
        PeerUnavailable: if llama-cpp-python or gguf is missing.
        RuntimeError: if llama.cpp cannot load the model.
    """

    def __init__(
        self,
        path: str | Path,
        dtype: str = "bfloat16",
        kv_dtype: str = "float16",
        unified: bool = False,
    ):
        self._llama = llama = harness.import_peer("llama_cpp", "llama-cpp-python")
        self.name = f"llama.cpp (kv {kv_dtype}, {'unified' if unified else 'split'})"
        self._kv_type = {"float32": 0, "float16": 1, "bfloat16": 30}[kv_dtype]
        self._unified = unified
        # llama.cpp keeps the pointer, so the callback must live as long as the library is used.
        self._log = llama.llama_log_callback(lambda level, text, data: None)
        llama.llama_log_set(self._log, ctypes.c_void_p())
        llama.llama_backend_init()
        self._temporary = tempfile.TemporaryDirectory()
        file = Path(path)
        if file.is_dir():
            file = Path(self._temporary.name) / "model.gguf"
            write_gguf(path, file, dtype)
        parameters = llama.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self._model = llama.llama_model_load_from_file(str(file).encode(), parameters)
        if not self._model:
            raise RuntimeError(
                f"LlamaCppPeer: {path} must be a model that llama.cpp can load. "
                "Check that it is a plain Llama."
            )
        vocabulary = llama.llama_model_get_vocab(self._model)
        self._vocab_size = llama.llama_vocab_n_tokens(vocabulary)
        self._context: Any = None
        self._batch: Any = None

    def _open(self, batch: int, max_len: int, max_tokens: int) -> None:
        """Create a context for `batch` sequences of `max_len` tokens."""
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
        """Append tokens [B, T] to the sequences, and return the next token of each, [B]."""
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
        """See `Peer.prefill`. The context is created before the clock starts."""
        self._open(1, prompt_len + 1, prompt_len)
        prompts = prompt_tokens(1, prompt_len, self._vocab_size)
        return harness.elapsed(lambda: self._decode(prompts, 0))

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


def _rope_pairs_adjacent(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of a Q or K projection, [heads * D, E], to rotate adjacent pairs.

    Hugging Face rotates row i of a head with row i + D/2; llama.cpp's "llama" architecture rotates
    row 2i with 2i + 1.
    """
    halves = weight.reshape(num_heads, 2, -1, weight.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def write_gguf(folder: str | Path, path: str | Path, dtype: str) -> None:
    """Convert a Hugging Face Llama folder into a GGUF file without vocabulary.

    Only one tensor at a time is in memory, so that the conversion does not increase the peak memory
    of the process. Norm weights are float32, as llama.cpp requires.

    Raises:
        PeerUnavailable: if gguf is missing.
        ValueError: if the folder contains a tensor that plain Llama does not have.
    """
    gguf = harness.import_peer("gguf", "gguf")
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
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
    # The benchmark passes token ids and reads logits, and never tokenizes text.
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
                    f"write_gguf: tensors must belong to a plain Llama, got {name}. "
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


PEERS: dict[str, Callable[[str | Path, str], Peer]] = {
    "transformers-dynamic": lambda folder, dtype: TransformersPeer(folder, dtype, "dynamic"),
    "transformers-static": lambda folder, dtype: TransformersPeer(folder, dtype, "static"),
    "transformers-compiled": lambda folder, dtype: TransformersPeer(folder, dtype, "static", True),
    "llama.cpp": lambda folder, dtype: LlamaCppPeer(folder, dtype),
    "llama.cpp-unified": lambda folder, dtype: LlamaCppPeer(folder, dtype, unified=True),
}
"""Every peer by name, created from a model folder and a key of `shapes.DTYPES`."""

_PACKAGES = {
    "transformers": {"torch": "torch", "transformers.models.llama": "transformers"},
    "llama.cpp": {"llama_cpp": "llama-cpp-python", "gguf": "gguf"},
}


def measure(
    name: str, folder: str | Path, dtype: str, batch: int, prompt_len: int, new_tokens: int
) -> dict[str, Any]:
    """Measure one peer in this process, for JSON. The process should have done nothing else.

    Each decode step is timed, starting with `prompt_len` cached tokens. Prefill is timed five times
    with a prompt of 512 tokens, after a warm-up. "best" is the shortest time: the speed of the
    engine without other load.

    Raises:
        PeerUnavailable: if packages of the peer are missing.
    """
    packages = next(names for prefix, names in _PACKAGES.items() if name.startswith(prefix))
    for module, package in packages.items():
        harness.import_peer(module, package)
    after_import, _ = harness.resident_bytes()
    peer = PEERS[name](folder, dtype)
    peer.start(batch, prompt_len, new_tokens + 2)
    steps = timed_steps(peer, new_tokens, warmup=2)
    _, decode_peak = harness.resident_bytes()
    prefills = [peer.prefill(PREFILL_LEN) for _ in range(6)][1:]
    _, peak = harness.resident_bytes()
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
    """Measure one peer and print one JSON line."""
    parser = argparse.ArgumentParser(description="Measure one peer on the CPU.")
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="135M")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="model folder, instead of --shape")
    options = parser.parse_args(arguments)
    if options.folder is not None and not (options.folder / "config.json").is_file():
        parser.error(f"--folder must contain a config.json, got {options.folder}")
    with contextlib.ExitStack() as stack:
        folder = options.folder or stack.enter_context(
            harness.random_model_folder(options.shape, options.dtype)
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
