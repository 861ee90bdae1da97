"""`Upkeep`: what is done with an engine between its steps."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from paged_jax.arguments import ArgumentError
from paged_jax.engine.parts import EngineParts
from paged_jax.engine.sleep import TAGS
from paged_jax.engine.transfers import own_transfers
from paged_jax.engine.weight_swap import load_like
from paged_jax.models.llama import Llama
from paged_jax.models.loading.conversion import NameMap
from paged_jax.monitoring import Status


class Upkeep(EngineParts):
    """Compiles, empties the prefix cache, replaces weights, sleeps. `Engine` has it all."""

    def follow(self) -> None:
        """Run what process 0 has this process run, until its engine ends.

        For an engine whose devices belong to several processes: each makes it with the same
        arguments, process 0 is asked, all others follow. See `paged_jax.distributed`.

        Raises:
          RuntimeError: this process is process 0, or has all devices of the engine.
          JaxRuntimeError: process 0 is gone.
        """
        if self._is_leader:
            raise RuntimeError(
                "Engine.follow: this process must be one that follows, got the one that schedules. "
                "Call step, generate or the like here."
            )
        self._runner.follow()

    @own_transfers()
    def warmup(self, report: Callable[[int, int, str], None] | None = None) -> None:
        """Compile every program that requests may need, so that no request waits for it.

        Args:
          report: function that is called with the number of compiled programs, the number of all
            programs, and the name of the last compiled program. By default a progress bar shows
            them on a terminal or in a notebook.

        Raises:
          RuntimeError: a request is unfinished, or the engine sleeps.
        """
        self._check_leads("warmup")
        self._sleep.check_awake("warmup")
        self._requests.check_idle("warmup")
        if report is not None:
            self._runner.warmup(report)
            return
        status = Status()
        with status.bar("compiling", unit="program"):
            self._runner.warmup(status.move_to)

    @own_transfers()
    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache: later requests find no block of earlier ones."""
        if not self._sleep.level:  # else there is none
            self._runner.slots.reset_prefix_cache()

    def update_params(self, params: Llama | Any, *, mapping: NameMap | None = None) -> None:
        """Replace the weights, as after a training step. Only the first call compiles: how to copy.

        What the prefix cache holds is not found any more. Unfinished requests keep the tokens that
        they have, which are computed again under the new weights. An engine that sleeps has the
        weights on its device from then on.

        One program copies the new weights over the old ones, whose arrays are gone then; only those
        of a `Llama` that the engine was made from stay. So memory for the engine's weights is
        needed once, beside the caller's.

        Args:
          params: a `Llama`, its ``nnx.state``, or a list of the leaves of that, in their order; of
            the same structure and shapes as the engine's. With a `mapping` the parameters of any
            definition of the same model: a module, its state, or a tree of arrays, on these devices
            or others. Copied, in the dtypes and to the places of the old weights.
          mapping: names of Hugging Face by the dotted paths to the arrays. A ``*`` stands for the
            number of a layer, ``{"layers.*.norm1.w": "model.layers.*.input_layernorm.weight"}``; in
            the second name only, for the first axis of the array. With ``(name, axes)`` the array
            is transposed first. Axes of Hugging Face may be divided, ``[H, D, E]`` for
            ``[H * D, E]``. What the mapping leaves out has its name of Hugging Face already.

        Raises:
          ValueError: structure, names or shapes differ; nothing has changed then.

        Example:
          >>> import jax.numpy as jnp
          >>> from paged_jax import Engine
          >>> engine = Engine(max_num_seqs=2)
          >>> kernel = jnp.zeros((5, engine.config.hidden_size, engine.config.intermediate_size))
          >>> engine.update_params({"layers": {"gate": kernel}}, mapping={
          ...     "layers.gate": ("model.layers.*.mlp.gate_proj.weight", (0, 2, 1))})
          Traceback (most recent call last):
          ...
          paged_jax.models.loading.parameters.WeightsError: update_params: params must hold ...
        """
        self._check_alone("update_params")
        new = self._weight_swap.prepare(params, mapping)
        with self._guard.change():
            # First: from here on nothing is found that the old weights have computed.
            has_unfinished = self._requests.note_new_weights()
            self._weight_swap.replace(new)
            self._sleep.weights_replaced()
            if has_unfinished or self._sleep.level:
                self._restart()
            else:
                self._runner.slots.reset_prefix_cache()

    @own_transfers()
    def load_params(self, folder: str | Path) -> Llama:
        """Load weights for `update_params` from a folder, into host memory.

        It changes nothing, so another thread may call it while the engine runs.

        Args:
          folder: a Hugging Face folder or a checkpoint of `save_checkpoint`, of the same structure
            as the engine's model.

        Raises:
          ValueError: the folder holds another model, or its files are damaged.
          OSError: files are not there or cannot be read.
        """
        return load_like(self._runner.weights.layout_model, folder)

    # Sleep

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine sleeps. Other threads may ask."""
        return bool(self._sleep.level)

    @property
    def sleep_level(self) -> int:
        """0 while the engine is awake, else the level of its sleep. Other threads may ask."""
        return self._sleep.level

    def sleep(self, level: int = 1) -> None:
        """Give back the memory of the device until `wake_up`, as for a training step beside it.

        The pool is given up, with all that is cached. Unfinished requests keep the tokens that they
        have, and continue after `wake_up`; until then nothing runs, and requests are refused.
        Arrays that others hold, such as those of a `Llama` that the engine was made from, stay.

        Args:
          level: 1 keeps the weights in host memory; 2 gives them up, so that `update_params` must
            bring others before the engine can wake.

        Raises:
          ValueError: there is no such level.

        Example:
          >>> from paged_jax import Engine
          >>> engine = Engine(max_num_seqs=2)
          >>> engine.sleep()
          >>> engine.is_sleeping
          True
          >>> engine.wake_up()
        """
        if level not in (1, 2) or isinstance(level, bool):
            raise ArgumentError("Engine.sleep", f"must be 1 or 2, got {level!r}.", "level")
        self._check_alone("sleep")
        with self._guard.change():
            self._sleep.begin(level)
            self._restart()

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """End a `sleep`. Nothing is compiled again; what was cached is gone.

        Args:
          tags: what to bring back: ``"weights"``, ``"kv_cache"`` or, by default, both. The engine
            sleeps until it has both.

        Raises:
          ValueError: a tag is neither.
          RuntimeError: the engine would wake without weights.
        """
        if isinstance(tags, str) or not set(tags or ()) <= set(TAGS):
            rule = f"must be of {' and '.join(TAGS)}, got {tags!r}."
            raise ArgumentError("Engine.wake_up", rule, "tags")
        if not self._sleep.level:
            return
        with self._guard.change():
            self._sleep.end(tags or TAGS)
            self._restart()
