"""One optimizer step: torch's own AdamW on arrays that come from objects and go back to objects."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gradserve.compute.engine.lora import Tensors
from gradserve.wire.errors import Invalid
from gradserve.wire.ops import AdamParams

_STEP = "step"
_FIRST, _SECOND = ".exp_avg", ".exp_avg_sq"


def fold(gradients: Iterable[Tensors]) -> Tensors:
    """The sum from left to right; a fixed order makes the bits independent of who finished first."""
    total: Tensors = {}
    for gradient in gradients:
        if not total:
            total = {name: tensor.clone() for name, tensor in gradient.items()}
        elif total.keys() != gradient.keys():
            raise Invalid("mixed_gradients", "these gradients belong to different adapters")
        else:
            for name, tensor in gradient.items():
                total[name].add_(tensor)
    return total


def adamw_step(
    weights: Tensors, moments: Tensors | None, gradient: Tensors, adam: AdamParams
) -> tuple[Tensors, Tensors, dict[str, float]]:
    """New weights, new moments and metrics; nothing given is changed. No gradient at all counts as zeros.

    Moments hold ``<param>.exp_avg``, ``<param>.exp_avg_sq`` and one scalar ``step``. The clip is on the global
    norm of the whole sum. Raises Invalid when the step leaves a weight that is not finite.
    """
    # Sorted: the order enters the norm's last bits, and must not depend on where the dict came from.
    parameters = {name: weights[name].detach().clone().requires_grad_() for name in sorted(weights)}
    for name, parameter in parameters.items():
        parameter.grad = gradient[name].clone() if gradient else torch.zeros_like(parameter)
    limit = adam.grad_clip_norm if adam.grad_clip_norm > 0 else float("inf")
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), limit, foreach=False)
    optimizer = torch.optim.AdamW(
        list(parameters.values()),
        lr=adam.learning_rate,
        betas=(adam.beta1, adam.beta2),
        eps=adam.eps,
        weight_decay=adam.weight_decay,
        foreach=False,
    )
    for name, parameter in parameters.items():
        optimizer.state[parameter] = _state(moments, name, parameter)
    optimizer.step()
    if not all(bool(parameter.isfinite().all()) for parameter in parameters.values()):
        raise Invalid("non_finite", "the optimizer step made weights that are not finite; nothing was changed.")
    return (
        {name: parameter.detach() for name, parameter in parameters.items()},
        _moments(optimizer, parameters),
        {"grad_norm": norm.item(), "learning_rate": adam.learning_rate},
    )


def _state(moments: Tensors | None, name: str, parameter: torch.Tensor) -> Tensors:
    if moments is None:
        zeros = torch.zeros_like(parameter)
        return {"step": torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
    return {
        "step": moments[_STEP].cpu().clone(),
        "exp_avg": moments[name + _FIRST].clone(),
        "exp_avg_sq": moments[name + _SECOND].clone(),
    }


def _moments(optimizer: torch.optim.AdamW, parameters: Tensors) -> Tensors:
    moments: Tensors = {}
    for name, parameter in parameters.items():
        state = optimizer.state[parameter]
        moments[name + _FIRST] = state["exp_avg"]
        moments[name + _SECOND] = state["exp_avg_sq"]
        moments[_STEP] = state["step"]
    return moments
