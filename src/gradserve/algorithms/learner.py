"""What ``fit`` trains: a module, or a language model's adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from gradserve.algorithms.optimizers import Optimizer

Metrics = dict[str, float]
Answer = Callable[[], Metrics]
"""Waits for a step; its loss, the loss's metrics, and the optimizer's."""


class Learner(Protocol):
    """One run on the server. Requests return at once; they are carried out in order."""

    def step(self, batch: Any, optimizer: Optimizer, number: int) -> Answer:
        """The gradient of the loss on a batch, and step ``number`` of the optimizer."""

    def save(self, name: str, position: bytes) -> str:
        """Name the state after all steps so far, with ``position`` beside it; the path."""

    def position(self) -> bytes:
        """What the checkpoint that the run began with has beside it; empty for a fresh run."""

    def model(self) -> Any:
        """What was trained, for the user."""
