# pyright: strict, reportUnknownMemberType=false
"""`EngineStats`: statistics of an engine since it was created."""

import dataclasses


@dataclasses.dataclass
class EngineStats:
    """Statistics of an engine since it was created. Times do not include compilation.

    Attributes:
      num_steps: number of engine steps; each may decode several tokens of a sequence.
      num_failed_steps: number of engine steps that raised an exception. The engine queues their
        requests again.
      num_prompt_tokens: number of prompt tokens computed, without tokens from the prefix cache.
      num_generated_tokens: number of generated tokens.
      num_decode_tokens: number of tokens generated in dispatches that did not compile a program.
      prefill_seconds: seconds that programs for prefill took.
      decode_seconds: seconds that programs for decoding took, until their tokens were on the host.
      host_seconds: seconds that the host worked while the device was idle.
      schedule_seconds: seconds to plan steps, including the plan's operations on the cache.
      postprocess_seconds: seconds to convert tokens to text and to finish requests.
        `schedule_seconds` and `postprocess_seconds` are part of `host_seconds`, except for steps in
        which the device decoded at the same time.
      compile_seconds: seconds to compile programs, when they are called for the first time.
      first_token_seconds: seconds from the arrival of the first request to its first token,
        including compilation.
      peak_num_blocks: maximum number of blocks that requests held at the end of a step.
      num_preemptions: number of times that a sequence lost its blocks to other sequences.
      num_swap_preemptions: number of preemptions that copied the blocks to host memory.
      num_recomputed_tokens: number of tokens computed again after a preemption.
      num_queried_tokens: number of tokens looked up in the prefix cache.
      num_cached_tokens: number of tokens found in the prefix cache.
      num_drafts: number of drafts in speculative decoding.
      num_draft_tokens: number of draft tokens.
      num_accepted_tokens: number of draft tokens that were accepted.
      num_accepted_at: number of accepted draft tokens at each position in the draft.
      sharing: fraction of blocks saved by sharing: the number of blocks saved, divided by the
        number of blocks that all sequences would hold without sharing, both summed over all steps
        (Kwon et al., 2023, section 6.3).
    """

    num_steps: int = 0
    num_failed_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    host_seconds: float = 0.0
    schedule_seconds: float = 0.0
    postprocess_seconds: float = 0.0
    compile_seconds: float = 0.0
    first_token_seconds: float = 0.0
    peak_num_blocks: int = 0
    num_preemptions: int = 0
    num_swap_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_queried_tokens: int = 0
    num_cached_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_at: tuple[int, ...] = ()
    sharing: float = 0.0
