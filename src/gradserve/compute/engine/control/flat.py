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
    """Adam (Kingma and Ba 2015, arXiv:1412.6980) by torch's fused kernel.

    ``parameters`` are leaves that share the vector's memory, and whose gradients share ``gradient``'s: run a
    backward, then ``step``. Nothing that is given is changed.
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
        self._vector.grad = torch.zeros_like(self._vector)
        self.parameters: Tensors = {}
        for name, part, gradient in zip(names, self._split(self._vector), self._split(self._vector.grad), strict=True):
            self.parameters[name] = part.detach().requires_grad_()
            self.parameters[name].grad = gradient
        self._adam = torch.optim.Adam([self._vector], lr=learning_rate, betas=betas, eps=eps, fused=True)
        self._state = self._adam.state[self._vector]
        self._state |= self._loaded(moments)

    def zero_grad(self) -> None:
        """Before a backward, which adds."""
        assert self._vector.grad is not None
        self._vector.grad.zero_()

    def step(self, max_norm: float) -> Tensor:
        """One step on the gradient, clipped to a global L2 norm (0: not); returns the norm before that."""
        gradient = self._vector.grad
        assert gradient is not None
        norm = torch.linalg.vector_norm(gradient)
        if max_norm > 0:
            gradient.mul_((max_norm / (norm + 1e-6)).clamp_(max=1.0))  # as torch.nn.utils.clip_grad_norm_
        self._adam.step()
        return norm

    def weights(self) -> Tensors:
        """The parameters as they are now, without their gradients."""
        return {name: part.clone() for name, part in zip(self._names, self._split(self._vector), strict=True)}

    def moments(self) -> Tensors:
        """``<param>.exp_avg``, ``<param>.exp_avg_sq`` and one scalar ``step``."""
        found: Tensors = {STEP: self._state["step"].clone()}
        for suffix, key in ((FIRST, "exp_avg"), (SECOND, "exp_avg_sq")):
            parts = self._split(self._state[key])
            found |= {name + suffix: part.clone() for name, part in zip(self._names, parts, strict=True)}
        return found

    def _loaded(self, moments: Mapping[str, Tensor] | None) -> Tensors:
        if moments is None or STEP not in moments:
            zeros = torch.zeros_like(self._vector)
            step = torch.zeros((), dtype=torch.float32, device=zeros.device)
            return {"step": step, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
        first, second = (_flat([moments[name + suffix] for name in self._names]) for suffix in (FIRST, SECOND))
        return {"step": moments[STEP].clone(), "exp_avg": first, "exp_avg_sq": second}

    def _split(self, vector: Tensor) -> list[Tensor]:
        parts = vector.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
