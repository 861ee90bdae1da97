"""Decides what runs next: requests, their order, and their waits. Plain Python: imports no jax.

Other folders use the names below, and the outputs of `paged_jax.scheduler.outputs`.
"""

from paged_jax.scheduler.completion import Completion
from paged_jax.scheduler.history import History
from paged_jax.scheduler.holdings import Holdings, num_swapped_blocks
from paged_jax.scheduler.memory import BlockMemory
from paged_jax.scheduler.plan import SchedulerStats, StepPlan
from paged_jax.scheduler.preemption import Preemption, PreemptionCosts
from paged_jax.scheduler.reasons import describe_match
from paged_jax.scheduler.request import Request, Sequence
from paged_jax.scheduler.scheduler import Scheduler, check_step_limits

__all__ = [
    "BlockMemory",
    "Completion",
    "History",
    "Holdings",
    "Preemption",
    "PreemptionCosts",
    "Request",
    "Scheduler",
    "SchedulerStats",
    "Sequence",
    "StepPlan",
    "check_step_limits",
    "describe_match",
    "num_swapped_blocks",
]
