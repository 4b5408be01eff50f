"""What a request wants of its scores: a public loss, a graph of the user's own, or given cotangents."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gradserve.compute.engine import losses
from gradserve.compute.engine.graph_store import BoundedGraph
from gradserve.compute.engine.packing import Packed
from gradserve.compute.engine.scores import Scores, Wanted
from gradserve.wire.data import Row
from gradserve.wire.errors import Invalid
from gradserve.wire.graph import Graph
from gradserve.wire.losses import LOSSES, computed, key_of

Found = tuple[Tensor, dict[str, float]]
"""The loss, a scalar to differentiate, and its metrics; keys carry their reduction (``loss:sum``)."""


class Objective(Protocol):
    """Belongs to one request."""

    @property
    def wanted(self) -> Wanted:
        """What it reads beside the log-probs of the targets."""
        ...

    def __call__(self, packed: Packed, scores: Scores) -> Found:
        """Raises Invalid."""
        ...


@dataclass(frozen=True)
class PublicLoss:
    """A loss of the protocol, by name."""

    name: str
    config: dict[str, float]

    @property
    def wanted(self) -> Wanted:
        """Nothing more."""
        return Wanted()

    def check(self, packed: Packed) -> None:
        """Raises Invalid when the rows lack what it needs."""
        if self.name == "cross_entropy":
            return
        if packed.targets.shape[1] != 1:
            raise Invalid("bad_shape", f"{self.name} takes one target per token", field="target_tokens")
        for name in LOSSES[self.name].required:
            if name != "target_tokens" and name not in packed.inputs:
                raise Invalid("missing_input", f"the loss {self.name} needs {name!r}", field=name, index=0)

    def __call__(self, packed: Packed, scores: Scores) -> Found:
        """The sum of its terms."""
        batch = self._batch(packed, scores.logprobs)
        terms = losses.FUNCTIONS[self.name](batch)
        return terms.sum(), losses.metrics(self.name, batch, terms)

    def _batch(self, packed: Packed, lp: Tensor) -> losses.Batch:
        """The ratio losses have one target per token and work on [N]."""
        if self.name == "cross_entropy":
            return losses.Batch(lp, packed.inputs, self.config, packed.lengths)
        flat = {name: values[:, 0] for name, values in packed.inputs.items()}
        return losses.Batch(lp[:, 0], flat, self.config, packed.lengths)


def public_loss(name: str, config: dict[str, float]) -> PublicLoss:
    """``config`` over the loss's defaults. Raises Invalid for an unknown loss or setting."""
    return PublicLoss(name, losses.settings(name, config))


GRAPH_SECONDS = 10.0
"""How long a user's loss may run on one request. The dry run has bounded its work before; this is the belt."""


@dataclass(frozen=True)
class GraphLoss:
    """A user's checked graph (docs/reference/custom-losses.md) over the rows of one request.

    A graph over a batch sees all rows at once, padded to [B, T]; one over rows sees each alone, and their losses and
    ``:sum`` metrics are added.
    """

    bounded: BoundedGraph
    rows: list[Row]
    device: torch.device

    @property
    def graph(self) -> Graph:
        """What it computes."""
        return self.bounded.graph

    @property
    def wanted(self) -> Wanted:
        """See Objective."""
        read = computed(self.graph.over)
        ranks = {given.name: given.shape for given in self.graph.inputs if given.name in read}
        topk = ranks["topk_logprobs"][-1] if "topk_logprobs" in ranks else 0
        assert isinstance(topk, int)
        return Wanted("entropy" in ranks, topk, "hidden" in ranks, "values" in ranks)

    def __call__(self, packed: Packed, scores: Scores) -> Found:
        """Raises Invalid when the graph does not give a scalar, or takes too long."""
        deadline = time.monotonic() + GRAPH_SECONDS
        parts = scores.split(packed.lengths)
        if self.graph.over == "batch":
            return self._run(self._of_batch(parts, packed.lengths), deadline)
        found = [self._run(self._of_row(index, part), deadline) for index, part in enumerate(parts)]
        total = torch.stack([loss for loss, _ in found]).sum()
        return total, _over_rows([metrics for _, metrics in found], float(total.detach()))

    def _run(self, values: dict[str, Tensor], deadline: float) -> Found:
        self.bounded.check(values)
        return _read(self.bounded.executable.run(values, deadline))

    def _of_batch(self, parts: list[Scores], lengths: list[int]) -> dict[str, Tensor]:
        sizes = torch.tensor(lengths, device=self.device)
        values: dict[str, Tensor] = {}
        for given in self.graph.inputs:
            per_row = len(given.shape) == 1
            match given.name:
                case "lengths":
                    values[given.name] = sizes
                case "mask":
                    values[given.name] = self._mask(sizes)
                case name if per_row:
                    values[name] = torch.stack([column.reshape(()) for column in self._given(name, given.dtype)])
                case name:
                    columns = self._computed(name, parts, len(given.shape) - 1) or self._given(name, given.dtype)
                    values[name] = pad_sequence(columns, batch_first=True)
        return values

    def _of_row(self, index: int, part: Scores) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        for given in self.graph.inputs:
            found = self._computed(given.name, [part], len(given.shape))
            value = found[0] if found else self._given(given.name, given.dtype)[index]
            values[given.name] = value if given.shape else value.reshape(())
        return values

    def _mask(self, sizes: Tensor) -> Tensor:
        """float32 [B, T]: the rows' own masks where they have them, else 1 at every token; 0 at padding."""
        if all("mask" in row.inputs for row in self.rows):
            return pad_sequence(self._given("mask", "float32"), batch_first=True)
        longest = torch.arange(int(sizes.max()), device=self.device)
        return (longest[None, :] < sizes[:, None]).to(torch.float32)

    def _computed(self, name: str, parts: list[Scores], rank: int) -> list[Tensor]:
        """What comes from the pass, row by row; nothing for what the request brings. ``rank`` counts a row's own."""
        if name not in computed(self.graph.over):
            return []
        found = [part.named()["topk" if name == "topk_logprobs" else name] for part in parts]
        return [tensor[:, 0] if name == "logprobs" and rank == 1 else tensor for tensor in found]

    def _given(self, name: str, dtype: str) -> list[Tensor]:
        """The rows' own inputs."""
        key = key_of(name, self.graph.over)
        wanted = None if dtype == "any" else getattr(torch, dtype)
        return [torch.from_numpy(np.array(row.inputs[key].numpy())).to(self.device, wanted) for row in self.rows]


def _read(outputs: dict[str, Tensor]) -> Found:
    loss = outputs["loss"]
    if loss.numel() != 1:
        raise Invalid("graph_output", f"the loss has shape {list(loss.shape)}; it must be one number", field="loss_fn")
    metrics = {
        key if ":" in key else f"{key}:mean": float(value.detach())
        for name, value in outputs.items()
        if (key := name.removeprefix("metrics.")) != name
    }
    total = loss.reshape(())
    return total, metrics | {"loss:sum": float(total.detach())}


def _over_rows(found: list[dict[str, float]], total: float) -> dict[str, float]:
    """Metrics of several rows as one: means for ``:mean``, sums for the rest."""
    together = {}
    for key in found[0]:
        values = [metrics[key] for metrics in found]
        together[key] = sum(values) / len(values) if key.endswith(":mean") else sum(values)
    return together | {"loss:sum": total}


@dataclass(frozen=True)
class Cotangents:
    """The derivative of a loss that was computed elsewhere, with respect to the scores of these rows.

    Its own value means nothing; its gradient is that of the loss.
    """

    values: dict[str, Tensor]

    @property
    def wanted(self) -> Wanted:
        """See Objective."""
        topk = self.values["topk"].shape[1] if "topk" in self.values else 0
        return Wanted("entropy" in self.values, topk, "hidden" in self.values, "values" in self.values)

    def __call__(self, packed: Packed, scores: Scores) -> Found:
        """The sum of scores times cotangents."""
        named = scores.named()
        total = torch.stack([(named[name] * value).sum() for name, value in self.values.items()]).sum()
        return total, {"loss:sum": float(total.detach())}
