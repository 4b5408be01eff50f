"""Optimizers by name, with torch.optim's names of settings and torch.optim's defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gradserve.wire.ops import AdamParams, SgdParams

Rate = float | Callable[[int], float]
"""A learning rate, or a function of the number of steps that were made."""

_ADAM: dict[str, Any] = {"learning_rate": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": _ADAM | {"weight_decay": 1e-2},
    "adam": _ADAM,
    "sgd": {"learning_rate": 1e-3, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0},
}


@dataclass(frozen=True)
class Optimizer:
    """``name`` is adamw, adam or sgd; ``settings`` are all of them.

    adamw and adam have learning_rate, betas, eps and weight_decay; sgd has learning_rate, momentum, dampening, nesterov
    and weight_decay; all have grad_clip_norm, a bound on the gradient's global L2 norm (0: none).
    """

    name: str
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, given: Mapping[str, Any]) -> Optimizer:
        """``given`` over the defaults. Raises ValueError for an unknown name, TypeError for an unknown setting."""
        if name not in _DEFAULTS:
            raise ValueError(f"there is no optimizer {name!r}; there are {', '.join(_DEFAULTS)}")
        settings = _DEFAULTS[name] | {"grad_clip_norm": 0.0}
        unknown = sorted(given.keys() - settings.keys())
        if unknown:
            raise TypeError(f"fit has no setting {unknown[0]!r}; {name} has {', '.join(settings)}")
        return cls(name, settings | dict(given))

    @property
    def coupled_decay(self) -> bool:
        """Whether weight decay is added to the gradient, as Adam has it, and not applied beside it."""
        return self.name == "adam"

    def rule(self, step: int) -> AdamParams | SgdParams:
        """The parameters of step number ``step``, the first is 0."""
        settings = dict(self.settings)
        if callable(settings["learning_rate"]):
            settings["learning_rate"] = float(settings["learning_rate"](step))
        if self.name == "sgd":
            return SgdParams(**settings)
        beta1, beta2 = settings.pop("betas")
        return AdamParams(beta1=beta1, beta2=beta2, **settings)
