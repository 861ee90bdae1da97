"""Goals for benchmark figures, and the check of a report against them."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

# Figure of a goal in a report: one value, one value per case by name, or None if not measured.
Figure = float | dict[str, float] | None


class Goal(NamedTuple):
    """A goal for the figure of every case to which it applies.

    Attributes:
      text: description of the goal.
      figure: returns the figure in a report.
      low: the smallest figure that meets the goal; None means no bound.
      high: the largest figure that meets the goal; None means no bound.
      form: format of the figure.
    """

    text: str
    figure: Callable[[Any], Figure]
    low: float | None = None
    high: float | None = None
    form: str = ".3g"

    def is_met(self, figure: float) -> bool:
        """Return whether one figure is within the bounds."""
        is_low = self.low is not None and figure < self.low
        return not is_low and (self.high is None or figure <= self.high)


def goal_lines_on(device: str | None, goals: Iterable[Goal], report: Any) -> list[str]:
    """Return the `goal_line` of each goal, followed by the device that was measured.

    Args:
      device: name of the accelerator; None for a CPU, where no device is shown.
      goals: goals for accelerators.
      report: report of a benchmark.
    """
    where = "" if device is None else f" [{device}]"
    return [f"{goal_line(goal, report)}{where}" for goal in goals]


def goal_line(goal: Goal, report: Any) -> str:
    """Return one line: met, NOT met, or not measured. With several cases the line shows the worst.

    Example:
      >>> goal_line(Goal("twice as fast", lambda report: report["ratio"], low=2.0), {"ratio": 2.5})
      'met           twice as fast: 2.5'
    """
    figure = goal.figure(report)
    if figure is None or figure == {}:
        return f"{'not measured':12s}  {goal.text}"
    if not isinstance(figure, dict):
        answer = "met" if goal.is_met(figure) else "NOT met"
        return f"{answer:12s}  {goal.text}: {figure:{goal.form}}"
    names = sorted(figure, key=lambda name: figure[name], reverse=goal.low is None)
    num_met = sum(map(goal.is_met, figure.values()))
    answer = "met" if num_met == len(names) else "NOT met"
    worst = f"worst {figure[names[0]]:{goal.form}} in {names[0]}"
    return f"{answer:12s}  {goal.text}; {num_met} of {len(names)} cases, {worst}"
