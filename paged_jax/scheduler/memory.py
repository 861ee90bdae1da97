"""`BlockMemory`: what the scheduler asks of the cache, without knowing arrays or block ids."""

from typing import Protocol

from paged_jax.scheduler.request import Sequence


class BlockMemory(Protocol):
    """The mechanism under the scheduler's policy. Each call takes effect at once."""

    @property
    def num_free(self) -> int:
        """Number of free blocks, those that are only cached included."""
        ...

    def attach(self, sequence: Sequence) -> int:
        """Start the empty slot of a sequence with the longest cached prefix of its tokens.

        The full blocks of all tokens but the last are looked up: ``(len(token_ids) - 1) // C``.
        Returns the number of tokens found.
        """
        ...

    def num_held(self, sequences: list[Sequence]) -> int:
        """How many blocks become free if these running sequences are released, and no others."""
        ...

    def release(self, sequence: Sequence) -> None:
        """Free all blocks of the sequence's slot; full ones stay findable where possible."""
        ...

    def swap_out(self, sequence: Sequence) -> None:
        """Copy the blocks of a sequence to host memory, then release its slot."""
        ...

    def swap_in(self, sequence: Sequence) -> None:
        """Fill the empty slot of a sequence with its ``num_computed`` tokens from host memory."""
        ...
