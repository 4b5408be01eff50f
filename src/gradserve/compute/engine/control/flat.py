"""A model's trainable parameters as one vector, so that a step on many small ones costs one call of each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Tensors = dict[str, Tensor]

STEP = "step"
FIRST, SECOND = ".exp_avg", ".exp_avg_sq"
"""The names of Adam's moments, as in engine/optim.py."""


class FlatAdam:
    """Adam (Kingma and Ba 2015, arXiv:1412.6980), element by element as torch.optim.Adam computes it.

    That class spends several times the arithmetic of a small model on its own bookkeeping. ``parameters`` are leaves
    that share the vector's memory: ``step`` moves them. Nothing that is given is changed.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        names: Sequence[str],
        moments: Mapping[str, Tensor] | None,
        learning_rate: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        self._names, self._shapes = names, [weights[name].shape for name in names]
        self._vector = _flat([weights[name] for name in names])
        self._learning_rate, self._betas, self._eps = learning_rate, betas, eps
        known = moments is not None and STEP in moments
        self._count = int(moments[STEP]) if moments is not None and known else 0
        self._first, self._second = (
            _flat([moments[name + suffix] for name in names])
            if moments is not None and known
            else torch.zeros_like(self._vector)
            for suffix in (FIRST, SECOND)
        )
        self.parameters = {
            name: part.detach().requires_grad_() for name, part in zip(names, self._split(self._vector), strict=True)
        }

    def step(self, loss: Tensor, max_norm: float) -> Tensor:
        """One step down the gradient of ``loss``, clipped to a global L2 norm (0: not); the norm before that."""
        leaves = list(self.parameters.values())
        with torch.no_grad():
            gradient = _flat(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))
            norm: Tensor = torch.linalg.vector_norm(gradient)
            if max_norm > 0:
                gradient.mul_((max_norm / (norm + 1e-6)).clamp_(max=1.0))  # as torch.nn.utils.clip_grad_norm_
            self._move(gradient)
        return norm

    def weights(self) -> Tensors:
        """The parameters as they are now."""
        return {name: part.clone() for name, part in zip(self._names, self._split(self._vector), strict=True)}

    def moments(self) -> Tensors:
        """``<param>.exp_avg``, ``<param>.exp_avg_sq`` and one scalar ``step``."""
        found: Tensors = {STEP: torch.tensor(float(self._count))}
        for suffix, vector in ((FIRST, self._first), (SECOND, self._second)):
            parts = self._split(vector)
            found |= {name + suffix: part.clone() for name, part in zip(self._names, parts, strict=True)}
        return found

    def _move(self, gradient: Tensor) -> None:
        beta1, beta2 = self._betas
        self._count += 1
        self._first.lerp_(gradient, 1 - beta1)
        self._second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        unbiased = (self._second.sqrt() / (1 - beta2**self._count) ** 0.5).add_(self._eps)
        self._vector.addcdiv_(self._first, unbiased, value=-self._learning_rate / (1 - beta1**self._count))

    def _split(self, vector: Tensor) -> list[Tensor]:
        parts = torch.split(vector, [shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
