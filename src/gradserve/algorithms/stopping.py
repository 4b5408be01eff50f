"""When a training ends before its last epoch: no better evaluation, or a budget that is spent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass
class EarlyStop:
    """Ends a training whose evaluations have not become better ``patience`` times in a row.

    ``metric`` is an evaluation's, ``mode`` says which is better; a change of at most ``min_delta`` is none.

    >>> stop = EarlyStop("eval/loss", patience=2, mode="min")
    >>> [stop.after({"eval/loss": loss}) for loss in (3.0, 2.0, 2.5, 2.0)]
    [False, False, False, True]
    """

    metric: str
    patience: int = 3
    mode: str = "max"
    min_delta: float = 0.0
    best: float | None = field(default=None, init=False)
    worse: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode is {self.mode!r}: give 'min' or 'max'")
        if self.patience < 1:
            raise ValueError(f"patience is {self.patience}: give at least 1 evaluation")

    def after(self, metrics: Mapping[str, float]) -> bool:
        """Whether to stop after an evaluation with these metrics. Raises KeyError when the metric is not there."""
        if self.metric not in metrics:
            raise KeyError(f"early stop looks at {self.metric!r}; the evaluation has {', '.join(sorted(metrics))}")
        value = metrics[self.metric] if self.mode == "max" else -metrics[self.metric]
        if self.best is None or value > self.best + self.min_delta:
            self.best, self.worse = value, 0
        else:
            self.worse += 1
        return self.worse >= self.patience

    def state(self) -> dict[str, float | int | None]:
        """For a checkpoint."""
        return {"best": self.best, "worse": self.worse}

    def restore(self, state: Mapping[str, float | int | None]) -> None:
        """The inverse."""
        self.best = state["best"]
        self.worse = int(state["worse"] or 0)


@dataclass(frozen=True)
class Budget:
    """Limits of one call of ``fit``, each None for no limit; they are looked at after each optimizer step.

    ``max_usd`` is of the run's whole bill, which a gradserve server tells.
    """

    max_steps: int | None = None
    max_minutes: float | None = None
    max_usd: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_steps", "max_minutes", "max_usd"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}: give a number above 0, or None for no limit")

    def spent(self, steps: int, began: float, bill: Callable[[], float]) -> str | None:
        """What is used up, in words; ``steps`` are the run's, ``began`` is of time.monotonic."""
        if self.max_steps is not None and steps >= self.max_steps:
            return f"max_steps={self.max_steps} reached"
        if self.max_minutes is not None and time.monotonic() - began >= 60 * self.max_minutes:
            return f"max_minutes={self.max_minutes:g} are over"
        if self.max_usd is not None and (amount := bill()) >= self.max_usd:
            return f"max_usd={self.max_usd:g}: the run has cost ${amount:.6f}"
        return None
