"""Peer that runs llama.cpp."""

import ctypes
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.bandwidth import num_cores
from benchmarks.common.process import import_peer
from benchmarks.generate.gguf_file import write_gguf
from benchmarks.generate.peer import prompt_tokens


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
        self._llama = llama = import_peer("llama_cpp", "llama-cpp-python")
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
