"""Text in, text out: requests join a running batch, share blocks, and leave it again.

The only place where state is replaced. A round is

    admit     while slots and blocks suffice: prefill the prompt, fork its samples, draw a token
    decode    one step for all running samples, in one jitted program
    release   the slots of the samples that stopped

A request is admitted only when the blocks that it may come to need are free of other claims, so
what is admitted finishes.
"""

import collections
import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from paged_jax import sampling, steps
from paged_jax.blocks import num_blocks_needed
from paged_jax.cache import PagedCache
from paged_jax.kernels import check_backend_runs_on, padded_head_dim
from paged_jax.models.llama import Llama
from paged_jax.models.pretrained import bundled_folder
from paged_jax.models.tokenizer import Tokenizer
from paged_jax.outputs import Logprob, RequestMetrics, RequestOutput
from paged_jax.request import Request, Sample
from paged_jax.sampling import SlotSampling
from paged_jax.sampling_params import SamplingParams

# A prompt is read in chunks of at most this many tokens, and a chunk is padded to a power of two
# no smaller than the other: a handful of programs serves every length.
MAX_CHUNK = 512
MIN_CHUNK = 16
# Most candidates reported with a token; SamplingParams allows no more.
MAX_LOGPROBS = 20
# Most stop_token_ids of a request with min_tokens, beside the model's own end tokens.
MAX_STOP_TOKEN_IDS = 16
# Memory for K and V on a device that does not say how much it has.
DEFAULT_CACHE_BYTES = 1 << 30
# Of the memory that an accelerator has free once the weights are there; the rest is for the steps.
CACHE_FRACTION = 0.85

Prompt = str | Mapping[str, Any]


@dataclasses.dataclass
class EngineStats:
    """Totals of an engine. Rates are made of times in seconds that leave compilation out.

    Attributes:
      num_prompt_tokens: read by prefill.
      num_generated_tokens: drawn, first tokens included.
      num_decode_tokens: drawn by decode steps that did not compile.
      prefill_seconds: from the admission of a request to its first token.
      decode_seconds: spent in decode steps that did not compile.
      compile_seconds: spent in compiling (first calls of programs).
      first_token_seconds: from the arrival of the first request to its first token, with the
        compilation that it waited for.
      peak_num_blocks: most blocks in use at once.
    """

    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    compile_seconds: float = 0.0
    first_token_seconds: float = 0.0
    peak_num_blocks: int = 0


class LLM:
    """A model, its tokenizer and a paged KV cache, ready to generate.

    Args:
      model: folder of a checkpoint (Hugging Face or Orbax), a `Llama`, or None for the small
        bundled model.
      tokenizer: a `Tokenizer` or a folder that holds one; by default that of the model's folder.
        Without one, prompts must be token ids and outputs have no text.
      dtype: of the weights: ``"auto"`` (as saved), ``"float32"``, ``"bfloat16"``, ``"float16"``.
      block_size: tokens in a block of KV memory.
      num_blocks: blocks in the pool; by default what the slots can use, within the free memory.
      max_num_seqs: samples that run at once, each in a slot.
      max_model_len: longest sequence in tokens, prompt included; by default the model's context.
      max_chunk: most prompt tokens that one step reads.
      seed: of requests that bring none.
      backend: of the attention, see `paged_attention`.
      sharding: where the weights go, see `Llama.from_pretrained`.
      on_compile: called with one line before a program is compiled.

    Example:
      >>> llm = LLM(max_num_seqs=2)
      >>> [output] = llm.generate(["It is"], SamplingParams(temperature=0, max_tokens=4))
      >>> len(output.outputs[0].token_ids)
      4
    """

    def __init__(
        self,
        model: str | Path | Llama | None = None,
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        dtype: str = "auto",
        block_size: int = 16,
        num_blocks: int | None = None,
        max_num_seqs: int = 16,
        max_model_len: int | None = None,
        max_chunk: int = MAX_CHUNK,
        seed: int = 0,
        backend: str | None = None,
        sharding: Any = None,
        on_compile: Callable[[str], None] | None = None,
    ):
        _require_positive(
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_chunk=max_chunk,
        )
        if isinstance(model, Llama):
            self.model = model
        else:
            self.model = Llama.from_pretrained(model, dtype=dtype, sharding=sharding)
        self.tokenizer = _load_tokenizer(model, tokenizer)
        self.config = self.model.config
        self.max_model_len = _max_model_len(self.config.max_position_embeddings, max_model_len)
        self.max_num_seqs = max_num_seqs
        self.block_size = block_size
        self.seed = seed
        self._max_chunk = max_chunk
        self._on_compile = on_compile or (lambda line: None)
        graphdef, state = nnx.split(self.model)
        self._weights, treedef = jax.tree.flatten(state)
        self._programs = steps.programs(graphdef, treedef, backend)
        self._compiled: set[tuple[str, int]] = set()
        self._device = next(iter(self._weights[0].devices()))
        check_backend_runs_on("LLM", backend, self._device.platform)
        # On CPU, XLA scatters into a bfloat16 pool through a float32 copy of all of it.
        is_cpu = self._device.platform == "cpu"
        self._cache_dtype = jnp.float32 if is_cpu else self._weights[0].dtype
        self._pool_head_dim = padded_head_dim(self.config.head_dim, self._device.platform)
        eos_token_ids = {
            *self.config.eos_token_ids,
            *(self.tokenizer.eos_token_ids if self.tokenizer else ()),
        }
        # A tokenizer may have tokens that the model does not.
        self._eos_token_ids = frozenset(
            token_id for token_id in eos_token_ids if 0 <= token_id < self.config.vocab_size
        )
        self._num_requests = 0
        self._stats = EngineStats()
        self.num_blocks = self._default_num_blocks() if num_blocks is None else num_blocks
        self._check_num_blocks()
        self._create_state()

    @property
    def cache(self) -> PagedCache:
        """The paged cache as it is now. The next step donates it: copy what must be kept."""
        return self._cache

    @property
    def stats(self) -> EngineStats:
        """Totals since the engine was built, as they are now."""
        return dataclasses.replace(self._stats)

    def get_default_sampling_params(self, **changes: Any) -> SamplingParams:
        """What the model's authors recommend, from its ``generation_config.json``.

        Greedy where they recommend nothing, or not to sample.

        Args:
          **changes: fields of `SamplingParams` to set otherwise.

        Raises:
          ValueError: a field is out of bounds.

        Example:
          >>> LLM(max_num_seqs=2).get_default_sampling_params().n
          1
        """
        recommended = self.tokenizer.sampling_defaults if self.tokenizer else {}
        return SamplingParams(**{**(recommended or {"temperature": 0.0}), **changes})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, batched; returns when all are complete.

        Args:
          prompts: a text, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``, or several.
          sampling_params: for all prompts, or one for each; by default those of
            `get_default_sampling_params`.
          use_tqdm: show progress on stderr if that is a terminal.

        Returns:
          One output for each prompt, in their order.

        Raises:
          ValueError: a prompt is empty, too long for the context or for the pool, or holds tokens
            out of range; a parameter does not suit the model. Nothing has been run then.
        """
        requests = self._requests(prompts, sampling_params)
        outputs: list[RequestOutput | None] = [None] * len(requests)
        # disable=None: on a terminal only.
        with (
            tqdm(
                total=len(requests), desc="Requests", disable=None if use_tqdm else True
            ) as progress,
            contextlib.closing(self._run(requests)) as running,
        ):
            for request in running:
                if request.is_finished:
                    outputs[request.index] = request.output()
                    progress.update()
        return [output for output in outputs if output is not None]

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template.

        Args:
          messages: ``{"role": ..., "content": ...}`` dicts, or a list of such conversations.
          sampling_params, use_tqdm: as for `generate`.

        Raises:
          ValueError: the model has no tokenizer or no chat template, or as for `generate`.
        """
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast(
            Sequence[Sequence[Mapping[str, str]]], [messages] if is_one else messages
        )
        prompts = [self.chat_prompt(conversation) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> Prompt:
        """The prompt that asks for the next message of a conversation.

        Raises:
          ValueError: the model has no tokenizer or no chat template.
        """
        if self.tokenizer is None:
            raise ValueError("LLM.chat: the model must have a tokenizer, got none.")
        text = self.tokenizer.apply_chat_template(messages)
        # The template writes the special tokens itself.
        return {"prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False)}

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """As `generate`, but yields a request's index and output whenever it has a new token.

        What is yielded is final: text that may turn out to be part of a stop string, or half a
        character, is held back. While the caller looks at an output its blocks are still there;
        closing the iterator releases them all.
        """
        # Not a generator itself: mistakes are raised here rather than when it is first read.
        return self._stream(self._requests(prompts, sampling_params))

    def _stream(self, requests: list[Request]) -> Generator[tuple[int, RequestOutput], None, None]:
        with contextlib.closing(self._run(requests)) as running:
            for request in running:
                yield request.index, request.output()

    # Requests

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        if isinstance(prompts, str | Mapping):
            prompts = [prompts]
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(
                f"LLM.generate: sampling_params must be one or as many as the {len(prompts)} "
                f"prompts, got {len(sampling_params)}."
            )
        pairs = zip(prompts, sampling_params, strict=True)
        requests = [self._request(i, *pair) for i, pair in enumerate(pairs)]
        self._num_requests += len(requests)
        return requests

    def _request(self, index: int, prompt: Prompt, params: SamplingParams) -> Request:
        text, token_ids = self._encode(prompt)
        number = self._num_requests + index
        room = self.max_model_len - len(token_ids)
        if room < 1:
            raise ValueError(
                f"LLM.generate: the prompt must have at most {self.max_model_len - 1} tokens, to "
                f"leave room in the context of {self.max_model_len}, got {len(token_ids)}."
            )
        self._check_params(params)
        seed = params.seed
        if seed is None:
            seed = int(np.random.SeedSequence([self.seed, number]).generate_state(1, np.uint64)[0])
            seed >>= 1
        request = Request(
            index=index,
            request_id=str(number),
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            seed=seed,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            samples=self._samples(token_ids, params),
            metrics=RequestMetrics(arrival_time=time.perf_counter()),
        )
        needed = request.num_blocks(self.block_size)
        if needed > self.num_blocks:
            raise ValueError(
                f"LLM.generate: a request must fit the pool of {self.num_blocks} blocks of "
                f"{self.block_size} tokens, got {len(token_ids)} prompt tokens and {params.n} x "
                f"{request.max_tokens} new ones, which need {needed}. Use fewer tokens or more "
                "blocks."
            )
        return request

    def _samples(self, prompt_token_ids: list[int], params: SamplingParams) -> list[Sample]:
        tokenizer = self.tokenizer
        # A first word keeps the space in front of it, unless nothing but a start token precedes it.
        continues_text = tokenizer is not None and not all(
            tokenizer.is_special(token_id) for token_id in prompt_token_ids
        )
        return [
            Sample(i, params, tokenizer, continues_text=continues_text) for i in range(params.n)
        ]

    def _check_params(self, params: SamplingParams) -> None:
        """Refuse what does not suit this model or this engine."""
        if params.n > self.max_num_seqs:
            raise ValueError(
                f"LLM.generate: n must be at most max_num_seqs = {self.max_num_seqs}, "
                f"got {params.n}."
            )
        if params.stop and self.tokenizer is None:
            raise ValueError(
                f"LLM.generate: stop must be empty as the model has no tokenizer, got "
                f"{params.stop}. Use stop_token_ids."
            )
        bias, stop_token_ids = params.logit_bias or {}, params.stop_token_ids or ()
        self._check_token_ids("logit_bias", bias)
        self._check_token_ids("stop_token_ids", stop_token_ids)
        most = self._sampling.bias_ids.shape[1]
        if len(bias) > most:
            raise ValueError(
                f"LLM.generate: logit_bias must have at most {most} entries, got {len(bias)}."
            )
        most = self._sampling.held_ids.shape[1] - len(self._eos_token_ids)
        if params.min_tokens and len(stop_token_ids) > most:
            raise ValueError(
                f"LLM.generate: stop_token_ids must be at most {most} where min_tokens is set, "
                f"got {len(stop_token_ids)}."
            )

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        if not isinstance(prompt, Mapping):
            raise ValueError(
                "LLM.generate: a prompt must be a text or a dict with either prompt or "
                f"prompt_token_ids, got {prompt!r}."
            )
        text = prompt.get("prompt")
        token_ids = prompt.get("prompt_token_ids")
        if (text is None) == (token_ids is None):
            raise ValueError(
                "LLM.generate: a prompt must be a text or a dict with either prompt or "
                f"prompt_token_ids, got the keys {sorted(prompt)}."
            )
        if token_ids is None:
            if self.tokenizer is None:
                raise ValueError(
                    "LLM.generate: the model must have a tokenizer for text prompts, got none. "
                    "Pass prompt_token_ids."
                )
            if not isinstance(text, str) or not text:
                raise ValueError(
                    f"LLM.generate: prompt must be a text of at least one character, got {text!r}."
                )
            if not _is_unicode(text):
                raise ValueError(
                    f"LLM.generate: prompt must be valid Unicode text, got {text[:40]!r}. Decode "
                    "its bytes by their right encoding."
                )
            token_ids = self.tokenizer.encode(text)
        if isinstance(token_ids, str) or not isinstance(token_ids, Iterable):
            raise ValueError(
                f"LLM.generate: prompt_token_ids must be a list of integers, got {token_ids!r}."
            )
        token_ids = list(token_ids)
        if not token_ids:
            raise ValueError("LLM.generate: prompt_token_ids must hold at least one token, got [].")
        self._check_token_ids("prompt_token_ids", token_ids)
        return text, [int(token_id) for token_id in token_ids]

    def _check_token_ids(self, name: str, token_ids) -> None:
        for token_id in token_ids:
            is_integer = isinstance(token_id, int | np.integer) and not isinstance(token_id, bool)
            if not is_integer or not 0 <= token_id < self.config.vocab_size:
                raise ValueError(
                    f"LLM.generate: {name} must hold integers in "
                    f"0..{self.config.vocab_size - 1}, got {token_id!r}."
                )

    # Rounds

    def _run(self, requests: list[Request]) -> Generator[Request, None, None]:
        """Yield a request whenever it has new tokens, until all are finished."""
        if self._running:
            raise RuntimeError(
                "LLM.generate: only one generation may run at a time. Finish or close the other."
            )
        waiting = collections.deque(requests)
        try:
            while waiting or self._running:
                while waiting and self._can_admit(waiting[0]):
                    request = waiting.popleft()
                    self._admit(request)
                    yield request
                    self._release_finished()
                assert self._running or not waiting, "a request that waits must fit an empty pool"
                if self._running:
                    for request in self._decode():
                        yield request
                    self._release_finished()
        except BaseException:  # a closed iterator and Ctrl-C included
            self._abort()
            raise

    def _can_admit(self, request: Request) -> bool:
        return (
            len(request.samples) <= len(self._free_slots)
            and request.num_blocks(self.block_size) <= self._num_unclaimed
        )

    def _admit(self, request: Request) -> None:
        """Prefill a prompt, share it among the request's samples, and draw their first tokens."""
        start, compiled = time.perf_counter(), self._stats.compile_seconds
        request.mark(first_scheduled_time=start)
        self._num_unclaimed -= request.num_blocks(self.block_size)
        for sample in request.samples:
            sample.slot = self._free_slots.pop()
            self._running[sample.slot] = (request, sample)
        first, *others = [sample.slot for sample in request.samples]
        logits = self._prefill(first, request.prompt_token_ids)
        if others:
            parents = np.full(self.max_num_seqs, -1, np.int32)
            parents[others] = first
            with self._compiling("fork of samples"):
                self._cache, ok = self._programs.fork(self._cache, parents)
            assert bool(ok), "a fork into empty slots needs no block"
        with self._compiling("choice of tokens"):
            self._assign(request)
        slots = self._bucket([sample.slot for sample in request.samples])
        num_top = self._num_top([request])
        with self._compiling(f"first token of {slots.size} samples", num_top):
            tokens, self._sampling = self._programs.first(
                logits,
                self._cache,
                self._sampling,
                slots,
                np.int32(len(request.prompt_token_ids)),
                num_top=num_top,
            )
        self._take([(request, sample) for sample in request.samples], tokens)
        compiled = self._stats.compile_seconds - compiled
        self._stats.num_prompt_tokens += len(request.prompt_token_ids)
        self._stats.prefill_seconds += time.perf_counter() - start - compiled

    def _assign(self, request: Request) -> None:
        """Tell the device how the samples of a request are drawn."""
        for sample in request.samples:
            self._sampling = sampling.assign(
                self._sampling,
                sample.slot,
                request.params,
                seed=request.seed,
                sample_index=sample.index,
                prompt_token_ids=request.prompt_token_ids,
                eos_token_ids=() if request.params.ignore_eos else sorted(self._eos_token_ids),
            )

    def _prefill(self, slot: int, token_ids: list[int]) -> jax.Array:
        logits = None
        for start in range(0, len(token_ids), self._max_chunk):
            chunk = token_ids[start : start + self._max_chunk]
            padded = np.zeros((1, min(self._max_chunk, _power_of_two(len(chunk)))), np.int32)
            padded[0, : len(chunk)] = chunk
            with self._compiling(f"prefill of {padded.size} tokens"):
                logits, self._cache, ok = self._programs.prefill(
                    self._weights,
                    self._cache,
                    padded,
                    np.array([slot], np.int32),
                    np.array([len(chunk)], np.int32),
                )
            assert bool(ok), "the blocks were claimed on admission"
        assert logits is not None
        return logits

    def _decode(self) -> list[Request]:
        start, compiled = time.perf_counter(), self._stats.compile_seconds
        running = list(self._running.values())
        slots = self._bucket([sample.slot for _, sample in running])
        token_ids = np.zeros(slots.size, np.int32)
        token_ids[: len(running)] = [sample.token_ids[-1] for _, sample in running]
        num_top = self._num_top([request for request, _ in running])
        with self._compiling(f"decode of {slots.size} samples", num_top):
            tokens, self._cache, self._sampling = self._programs.decode(
                self._weights, self._cache, self._sampling, token_ids, slots, num_top=num_top
            )
        self._take(running, tokens)
        compiled = self._stats.compile_seconds - compiled
        if not compiled:
            self._stats.decode_seconds += time.perf_counter() - start
            self._stats.num_decode_tokens += len(running)
        return list({id(request): request for request, _ in running}.values())

    def _take(self, running: list[tuple[Request, Sample]], tokens: steps.Tokens) -> None:
        """Give every sample its token."""
        tokens = jax.device_get(tokens)
        assert bool(tokens.ok), "the blocks were claimed on admission"
        num_used = self.num_blocks - int(tokens.num_free)
        self._stats.peak_num_blocks = max(self._stats.peak_num_blocks, num_used)
        self._stats.num_generated_tokens += len(running)
        now = time.perf_counter()
        for row, (request, sample) in enumerate(running):
            logprob = float(tokens.logprobs[row])
            if math.isnan(logprob):
                raise FloatingPointError(
                    f"LLM.generate: the model gave NaN for request {request.request_id} after "
                    f"{len(request.prompt_token_ids) + len(sample.token_ids)} tokens. Its weights "
                    "may be damaged, or overflow in their dtype."
                )
            sample.append(
                int(tokens.token_ids[row]),
                logprob,
                eos_token_ids=self._eos_token_ids,
                max_tokens=request.max_tokens,
                candidates=self._candidates(request.params, tokens, row),
            )
            if request.metrics.first_token_time is None:
                request.mark(first_token_time=now)
                if not self._stats.first_token_seconds:
                    self._stats.first_token_seconds = now - request.metrics.arrival_time
        for request, _ in running:
            if request.is_finished:
                request.mark(finished_time=now)

    def _candidates(
        self, params: SamplingParams, tokens: steps.Tokens, row: int
    ) -> dict[int, Logprob] | None:
        if params.logprobs is None:
            return None
        drawn = (tokens.token_ids[row], tokens.logprobs[row], tokens.ranks[row])
        top = zip(
            tokens.top_ids[row],
            tokens.top_logprobs[row],
            range(1, params.logprobs + 1),
            strict=False,
        )
        return {
            int(token_id): Logprob(
                float(logprob),
                int(rank),
                self.tokenizer.decode(
                    [int(token_id)], skip_special_tokens=False, continues_text=True
                )
                if self.tokenizer
                else "",
            )
            for token_id, logprob, rank in (drawn, *top)
        }

    def _release_finished(self) -> None:
        done = [pair for pair in self._running.values() if pair[1].finish_reason is not None]
        if not done:
            return
        for request, sample in done:
            del self._running[sample.slot]
            self._free_slots.append(sample.slot)
            self._num_unclaimed += request.num_blocks_per_sample(self.block_size)
            if request.is_finished and not any(r is request for r, _ in self._running.values()):
                self._num_unclaimed += request.num_blocks_shared(self.block_size)
        self._release([sample.slot for _, sample in done])

    def _release(self, slots: list[int]) -> None:
        mask = np.zeros(self.max_num_seqs, bool)
        mask[slots] = True
        with self._compiling("release of slots"):
            self._cache = self._programs.release(self._cache, mask)

    def _abort(self) -> None:
        """Bring every block home, whatever happened, and wherever the round was interrupted."""
        if self._cache.k.is_deleted() or self._sampling.keys.is_deleted():
            # Interrupted between a step's donation of the state and the return of the new one.
            self._create_state()
            return
        self._release(_all_slots(self.max_num_seqs))
        self._running.clear()
        self._free_slots = _all_slots(self.max_num_seqs)
        self._num_unclaimed = self.num_blocks

    # State

    def _create_state(self) -> None:
        config = self.config
        with jax.default_device(self._device):
            self._cache = PagedCache.create(
                num_layers=config.num_hidden_layers,
                num_blocks=self.num_blocks,
                num_kv_heads=config.num_key_value_heads,
                block_size=self.block_size,
                head_dim=self._pool_head_dim,
                num_slots=self.max_num_seqs,
                max_blocks_per_slot=self._max_blocks_per_slot(),
                dtype=self._cache_dtype,
            )
            self._sampling = SlotSampling.create(
                self.max_num_seqs,
                config.vocab_size,
                max_stop_ids=len(self._eos_token_ids) + MAX_STOP_TOKEN_IDS,
            )
        self._running: dict[int, tuple[Request, Sample]] = {}
        self._free_slots = _all_slots(self.max_num_seqs)
        self._num_unclaimed = self.num_blocks

    def _default_num_blocks(self) -> int:
        """Enough for all slots at full length, if memory allows."""
        statistics = self._device.memory_stats()
        budget = DEFAULT_CACHE_BYTES
        if statistics and "bytes_limit" in statistics:
            free = statistics["bytes_limit"] - statistics["bytes_in_use"]
            budget = int(CACHE_FRACTION * free)
        wanted = self.max_num_seqs * self._max_blocks_per_slot()
        num_blocks = min(wanted, budget // self._block_bytes())
        if num_blocks < 1:
            raise ValueError(
                f"LLM: a block of {self.block_size} tokens must fit the {budget} bytes of memory "
                f"for K and V, got {self._block_bytes()} bytes. Use a smaller block_size."
            )
        return num_blocks

    def _check_num_blocks(self) -> None:
        """Refuse a pool that the host can never hold: the system would end the process for it."""
        if self._device.platform != "cpu" or not hasattr(os, "sysconf"):
            return
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if self.num_blocks * self._block_bytes() > memory:
            raise ValueError(
                f"LLM: num_blocks must fit the memory of {memory} bytes, got {self.num_blocks} "
                f"blocks of {self._block_bytes()} bytes. Use fewer."
            )

    def _max_blocks_per_slot(self) -> int:
        return num_blocks_needed(self.max_model_len, self.block_size)

    def _block_bytes(self) -> int:
        """Bytes of K and V in one block, all layers together."""
        config = self.config
        elements = config.num_key_value_heads * self.block_size * self._pool_head_dim
        return 2 * config.num_hidden_layers * elements * jnp.dtype(self._cache_dtype).itemsize

    def _bucket(self, slots: list[int]) -> np.ndarray:
        """Pad slots with -1 to a power of two, so that few programs serve all batches."""
        size = min(_power_of_two(len(slots), least=1), self.max_num_seqs)
        return np.array(slots + [-1] * (size - len(slots)), np.int32)

    def _num_top(self, requests: list[Request]) -> int:
        if all(request.params.logprobs is None for request in requests):
            return 0
        return min(MAX_LOGPROBS, self.config.vocab_size)

    @contextlib.contextmanager
    def _compiling(self, program: str, variant: int = 0) -> Iterator[None]:
        """Around the call of a program: say so, and count the time, if it compiles here."""
        if (program, variant) in self._compiled:
            yield
            return
        self._on_compile(f"compiling {program}")
        start = time.perf_counter()
        yield
        self._compiled.add((program, variant))
        self._stats.compile_seconds += time.perf_counter() - start


def _load_tokenizer(
    model: str | Path | Llama | None, tokenizer: str | Path | Tokenizer | None
) -> Tokenizer | None:
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if tokenizer is not None:
        return Tokenizer.from_folder(tokenizer)
    if isinstance(model, Llama):
        return None
    folder = bundled_folder() if model is None else Path(model)
    return Tokenizer.from_folder(folder) if (folder / "tokenizer.json").exists() else None


def _max_model_len(context: int, wanted: int | None) -> int:
    if wanted is not None and wanted > context:
        raise ValueError(
            f"LLM: max_model_len must be at most the model's context of {context}, got {wanted}."
        )
    return wanted or context


def _all_slots(num_slots: int) -> list[int]:
    # Popped from the end: slot 0 is taken first.
    return list(range(num_slots))[::-1]


def _is_unicode(text: str) -> bool:
    """False for lone surrogates, which stand for bytes that could not be decoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _power_of_two(number: int, least: int = MIN_CHUNK) -> int:
    return max(least, 1 << (number - 1).bit_length())


def _require_positive(**sizes: int | None) -> None:
    for name, size in sizes.items():
        is_integer = isinstance(size, int) and not isinstance(size, bool)
        if size is not None and (not is_integer or size < 1):
            raise ValueError(f"LLM: {name} must be a positive integer, got {size!r}.")
