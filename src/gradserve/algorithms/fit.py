"""``gradserve.fit``: any algorithm on any module or language model, the loop included.

class Regression:
    model = torch.nn.Linear(3, 1)

    def data_loader(self, batch_size): ...      # dicts of tensors
    def loss_fn(self, model, batch): ...        # loss, or (loss, metrics)

fitted = gradserve.fit(Regression(), epochs=10, batch_size=64, optimizer="sgd", learning_rate=0.1)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from gradserve.algorithms.learner import Answer, Learner, Metrics
from gradserve.algorithms.optimizers import Optimizer
from gradserve.algorithms.progress import Show, progress_line
from gradserve.client.connect import connect

if TYPE_CHECKING:
    import tinker
    from torch import nn

_AHEAD = 4
"""Steps that are asked for before the oldest one's answer is there."""


class Algorithm(Protocol):
    """What to learn from, and what to learn.

    It may have ``model`` (an nn.Module, or the name of a language model) and, for language models, ``loss_inputs``.
    """

    def data_loader(self, batch_size: int, /) -> Iterable[Any]:
        """One epoch's batches: dicts of tensors or arrays; of a language model, lists of rows (see LanguageLearner).

        ``resume`` counts on it: it must give the same batches again when the algorithm is made again.
        """

    def loss_fn(self, model: Any, batch: Any, /) -> Any:
        """A scalar tensor, or one and a dict of scalar metrics. It becomes a graph: see ``gradserve.loss``."""


@dataclass(frozen=True)
class Fitted:
    """``model``: a copy of the module with the trained weights, or the SDK's client of a language model's run.

    ``history``: one dict per step, with ``step`` (from 1), ``epoch`` (from 1), ``loss``, the loss's metrics and the
    optimizer's. ``path``: the checkpoint of the end, for ``resume``.
    """

    model: Any
    history: list[Metrics]
    path: str


class _Position(msgspec.Struct):
    """How many steps a checkpoint has behind it."""

    step: int = 0


def fit(
    algorithm: Algorithm,
    *,
    model: nn.Module | str | None = None,
    epochs: int = 1,
    batch_size: int = 32,
    optimizer: str = "adamw",
    service: tinker.ServiceClient | None = None,
    callback: Callable[[Metrics], Any] | None = None,
    checkpoint_every: int | None = None,
    resume: str | None = None,
    rank: int = 32,
    seed: int = 0,
    **settings: Any,
) -> Fitted:
    """Train ``model`` (None: ``algorithm.model``) for ``epochs`` passes over the algorithm's batches.

    ``optimizer`` is adamw, adam or sgd, for language models adamw; ``settings`` are its own, with torch.optim's names
    and defaults (see Optimizer). ``learning_rate`` may be a function of the number of steps made.

    ``callback`` gets each step's dict; what it returns, if true, ends the training (steps that were sent ahead, up to
    three, are still made). ``checkpoint_every`` saves as ``step-<n>`` every so many steps. ``resume`` is the path of a
    checkpoint of the same algorithm: its loader is run through again up to where the checkpoint stands, and training
    goes on from there, up to ``epochs`` in all.

    ``rank`` and ``seed`` are of a language model's adapters. ``service`` is what ``gradserve.connect()`` gives; None:
    GRADSERVE_URL, or a server started for this call.

    Raises CaptureError for a loss that can't become a graph, TypeError and ValueError for arguments that do not fit,
    RequestFailed and ExtensionError for what the server refuses.
    """
    rule = Optimizer.of(optimizer, settings)
    model = model if model is not None else getattr(algorithm, "model", None)
    if model is None:
        raise TypeError("there is no model: give fit(..., model=...) or the algorithm a model")
    own = service is None
    service = service or (connect() if isinstance(model, str) else connect(models={}))
    try:
        learner = _learner(service, algorithm, model, rank, seed, resume)
        training = _Training(learner, rule, callback, checkpoint_every)
        training.run(algorithm, epochs, batch_size)
        return Fitted(learner.model(), training.history, training.save("final"))
    finally:
        if own:
            service.close("success")


def _learner(
    service: tinker.ServiceClient, algorithm: Algorithm, model: Any, rank: int, seed: int, resume: str | None
) -> Learner:
    if isinstance(model, str):
        from gradserve.algorithms.language_learner import LanguageLearner

        inputs = getattr(algorithm, "loss_inputs", {})
        return LanguageLearner(service, model, algorithm.loss_fn, inputs, rank, seed, resume)
    from gradserve.algorithms.module_learner import ModuleLearner

    return ModuleLearner(service, model, algorithm.loss_fn, resume)


class _Training:
    """The loop: a few steps in flight."""

    def __init__(
        self,
        learner: Learner,
        optimizer: Optimizer,
        callback: Callable[[Metrics], Any] | None,
        checkpoint_every: int | None,
    ) -> None:
        self.history: list[Metrics] = []
        self._learner, self._optimizer = learner, optimizer
        self._callback, self._every = callback, checkpoint_every
        self._asked = _begun(learner)
        self._pending: deque[tuple[int, int, Answer]] = deque()

    def run(self, algorithm: Algorithm, epochs: int, batch_size: int) -> None:
        """All steps, beyond those that a checkpoint has behind it."""
        behind = self._asked
        with progress_line("fit", None, behind, {"epoch": "epoch", "loss": "loss"}) as show:
            for number, (epoch, batch) in enumerate(_batches(algorithm, epochs, batch_size)):
                if number < behind:
                    continue
                self._ask(epoch, batch)
                if len(self._pending) == _AHEAD and self._settle(show):
                    break
                if self._every and self._asked % self._every == 0:
                    self.save(f"step-{self._asked}")
            while self._pending:
                self._settle(show)

    def save(self, name: str) -> str:
        """A checkpoint after all steps that were asked for."""
        return self._learner.save(name, msgspec.msgpack.encode(_Position(self._asked)))

    def _ask(self, epoch: int, batch: Any) -> None:
        answer = self._learner.step(batch, self._optimizer, self._asked)
        self._asked += 1
        self._pending.append((self._asked, epoch, answer))

    def _settle(self, show: Show) -> bool:
        """Wait for the oldest step; whether the callback wants no more."""
        step, epoch, answer = self._pending.popleft()
        self.history.append({"step": step, "epoch": epoch} | answer())
        show(self.history[-1])
        return self._callback is not None and bool(self._callback(self.history[-1]))


def _begun(learner: Learner) -> int:
    """The steps behind the checkpoint that the run began with."""
    position = learner.position()
    return msgspec.msgpack.decode(position, type=_Position).step if position else 0


def _batches(algorithm: Algorithm, epochs: int, batch_size: int) -> Iterator[tuple[int, Any]]:
    """(epoch from 1, batch) of all epochs."""
    for epoch in range(1, epochs + 1):
        for batch in algorithm.data_loader(batch_size):
            yield epoch, batch
