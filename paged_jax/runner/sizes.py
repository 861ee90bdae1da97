"""What shapes the compiled programs of an engine: plain numbers, known before any array is made."""

from typing import NamedTuple

from paged_jax.cache.sequence_blocks import num_blocks_needed

# Prompt tokens that one call scores: rarely asked for, so one program must do.
SCORE_WIDTH = 128
# Blocks that one call moves to or from the host: a call for each would cost more than the padding.
SWAP_WIDTH = 16
# Blocks that one call publishes, for the same reason.
PUBLISH_WIDTH = 32
# Every limit of decode steps up to this one has the same program: the arrays that depend on it are
# a few KB.
MIN_DISPATCH_CAPACITY = 8


class Sizes(NamedTuple):
    """What shapes the programs of an engine, but for the number of blocks in the pool.

    That number is chosen once it is known how much memory programs of these sizes take.

    Attributes:
      block_size: C, tokens in a block.
      num_slots: S, sequences that can run at once.
      max_model_len: most tokens of a sequence, prompt and generated.
      max_chunk: most tokens of one prefill batch.
      max_steps: most decode steps in one dispatch.
      num_drafts: most guessed tokens of a sequence in one verification; 0 is for no speculation.
      max_logit_bias: most entries in the logit bias of a request.
      max_stop_ids: most tokens that end a request's sequences.

    Example:
      >>> sizes = Sizes(block_size=16, num_slots=4, max_model_len=500, max_chunk=64,
      ...               max_steps=1, num_drafts=0, max_logit_bias=32, max_stop_ids=16)
      >>> sizes.max_blocks_per_slot, sizes.dispatch_capacity, sizes.score_width, sizes.swap_width
      (32, 8, 64, 16)
    """

    block_size: int
    num_slots: int
    max_model_len: int
    max_chunk: int
    max_steps: int
    num_drafts: int
    max_logit_bias: int
    max_stop_ids: int

    @property
    def max_blocks_per_slot(self) -> int:
        """M, the width of the block tables."""
        return num_blocks_needed(self.max_model_len, self.block_size)

    @property
    def most_tokens(self) -> int:
        """Most tokens that one program appends to a sequence."""
        return max(self.max_chunk, self.max_steps, 1 + self.num_drafts)

    @property
    def dispatch_capacity(self) -> int:
        """Decode steps that the compiled program has room for, a power of two.

        The number of steps is an argument of each call. So engines that differ in nothing but
        `max_steps` share one program.
        """
        return max(MIN_DISPATCH_CAPACITY, 1 << (self.max_steps - 1).bit_length())

    @property
    def max_forced(self) -> int:
        """Tokens of a sequence, known from its grammar, that one call has room for."""
        return max(self.dispatch_capacity, self.num_drafts)

    @property
    def score_width(self) -> int:
        """Prompt tokens that one call scores."""
        return min(SCORE_WIDTH, self.max_chunk)

    @property
    def swap_width(self) -> int:
        """Blocks that one call moves to or from the host."""
        return min(SWAP_WIDTH, self.max_blocks_per_slot)
