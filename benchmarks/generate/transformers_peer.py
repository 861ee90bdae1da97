"""Peer that runs Hugging Face transformers."""

import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.bandwidth import num_cores
from benchmarks.common.process import import_peer
from benchmarks.generate.peer import prompt_tokens


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
        torch = import_peer("torch", "torch")
        transformers = import_peer("transformers", "transformers")
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
