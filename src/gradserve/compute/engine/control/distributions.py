"""What a policy's outputs say about actions, for any space: a product of independent parts.

Discrete and MultiDiscrete are categorical, MultiBinary is Bernoulli, a Box is a Gaussian of diagonal covariance whose
log deviation does not depend on the state (details 24 to 26 of Huang et al. 2022). Dict and Tuple are products of
their parts. Outputs of all parts lie side by side: ``logits`` [n, L] of all that is discrete, ``mean`` [n, M] and
``log_std`` [M] or [n, M] of all boxes. A Bernoulli has one logit; a logit of -inf is an action that is never taken.

Legend: n rows, A action columns, L logits, M means, D uniform numbers per action.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from gradserve.compute.engine.control.spaces import Floats
from gradserve.wire.control import SpaceSpec
from gradserve.wire.errors import Invalid

LOGITS, MEAN, LOG_STD = "logits", "mean", "log_std"

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class _Part:
    """Columns ``at`` of the actions, drawn by ``kind`` from ``source`` (of logits or means) and ``noise``."""

    kind: Literal["categorical", "bernoulli", "gaussian"]
    at: slice
    source: slice
    noise: slice


class ActionDistribution:
    """The distribution of one action space's actions, as float32 columns [n, A].

    ``draws`` is D: how many uniform numbers an action needs.
    """

    def __init__(self, space: SpaceSpec) -> None:
        self._space = space
        self._parts: list[_Part] = []
        self._columns = self._logits = self._means = self.draws = 0
        self._add(space)

    def outputs(self, found: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
        """The distribution's own outputs among a policy's. Raises Invalid for one that lacks or has another shape."""
        wanted = {LOGITS: self._logits, MEAN: self._means, LOG_STD: self._means}
        outputs = {}
        for name, width in wanted.items():
            if not width:
                continue
            if name not in found or found[name].shape not in ((rows, width), (width,)):
                seen = tuple(found[name].shape) if name in found else "no such output"
                raise Invalid(
                    "bad_policy",
                    f"{name}: {seen}; a policy for this action space gives [{rows}, {width}].",
                    field="policy",
                    fix="Give logits for what is discrete, mean and log_std for boxes, and value.",
                )
            outputs[name] = found[name]
        return outputs

    def sample(self, outputs: Mapping[str, NDArray[Any]], noise: NDArray[np.float64]) -> Floats:
        """One action per row from ``noise`` [n, D], uniform in [0, 1): by the inverse of sums, and Box and Muller's."""
        actions = np.empty((len(noise), self._columns), np.float32)
        for part in self._parts:
            u = noise[:, part.noise]
            if part.kind == "gaussian":
                half = u.shape[1] // 2
                normal = np.sqrt(-2 * np.log1p(-u[:, :half])) * np.cos(2 * np.pi * u[:, half:])
                mean, log_std = outputs[MEAN][:, part.source], outputs[LOG_STD][..., part.source]
                actions[:, part.at] = mean + np.exp(log_std.astype(np.float64)) * normal
            elif part.kind == "bernoulli":
                actions[:, part.at] = u < 1 / (1 + np.exp(-outputs[LOGITS][:, part.source].astype(np.float64)))
            else:
                logits = outputs[LOGITS][:, part.source].astype(np.float64)
                reached = np.exp(logits - logits.max(axis=1, keepdims=True)).cumsum(axis=1)
                actions[:, part.at.start] = (reached <= u * reached[:, -1:]).sum(axis=1)
        return actions

    def mode(self, outputs: Mapping[str, NDArray[Any]]) -> Floats:
        """The likeliest action per row; the first of equals."""
        rows = len(next(iter(outputs.values())))
        actions = np.empty((rows, self._columns), np.float32)
        for part in self._parts:
            if part.kind == "gaussian":
                actions[:, part.at] = outputs[MEAN][:, part.source]
            elif part.kind == "bernoulli":
                actions[:, part.at] = outputs[LOGITS][:, part.source] > 0
            else:
                actions[:, part.at.start] = outputs[LOGITS][:, part.source].argmax(axis=1)
        return actions

    def log_prob(self, outputs: Mapping[str, Tensor], actions: Tensor) -> Tensor:
        """[n]: of actions [n, A], summed over the parts, differentiable in the outputs."""
        return _total([_log_prob(part, outputs, actions[:, part.at]) for part in self._parts])

    def entropy(self, outputs: Mapping[str, Tensor]) -> Tensor:
        """[n]: summed over the parts, differentiable in the outputs; a scalar where no output depends on the row."""
        return _total([_entropy(part, outputs) for part in self._parts])

    def _add(self, space: SpaceSpec) -> None:
        if space.parts:
            for part in space.parts:
                self._add(part)
        elif space.kind == "box":
            self._means += self._append("gaussian", space.size, space.size, 2 * space.size, self._means)
        elif space.kind == "multi_binary":
            self._logits += self._append("bernoulli", space.size, space.size, space.size, self._logits)
        else:
            for size in space.nvec:
                self._logits += self._append("categorical", 1, size, 1, self._logits)

    def _append(self, kind: Any, columns: int, width: int, draws: int, source: int) -> int:
        """Adds a part; returns how wide its outputs are."""
        at = slice(self._columns, self._columns + columns)
        part = _Part(kind, at, slice(source, source + width), slice(self.draws, self.draws + draws))
        self._parts.append(part)
        self._columns += columns
        self.draws += draws
        return width


def _log_prob(part: _Part, outputs: Mapping[str, Tensor], actions: Tensor) -> Tensor:
    if part.kind == "gaussian":
        log_std = outputs[LOG_STD][..., part.source]
        standard = (actions - outputs[MEAN][:, part.source]) * torch.exp(-log_std)
        return (-0.5 * standard.square() - log_std - _HALF_LOG_2PI).sum(dim=1)
    logits = outputs[LOGITS][:, part.source]
    if part.kind == "bernoulli":
        return -functional.binary_cross_entropy_with_logits(logits, actions, reduction="none").sum(dim=1)
    return -functional.cross_entropy(logits, actions[:, 0].long(), reduction="none")


def _entropy(part: _Part, outputs: Mapping[str, Tensor]) -> Tensor:
    if part.kind == "gaussian":
        log_std = outputs[LOG_STD][..., part.source]
        return (log_std + (0.5 + _HALF_LOG_2PI)).sum(dim=-1)
    logits = outputs[LOGITS][:, part.source]
    if part.kind == "bernoulli":
        return (functional.softplus(logits) - logits * torch.sigmoid(logits)).sum(dim=1)
    log_probs = torch.log_softmax(logits, dim=1)
    # exp(-inf) * -inf would be nan for actions that are masked out.
    return -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(dim=1)


def _total(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
