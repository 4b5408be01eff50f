"""One optimizer step: torch's own AdamW on arrays that come from objects and go back to objects."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gradserve.compute.engine.finite import all_finite
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


def moments_like(weights: Tensors) -> Tensors:
    """Meta tensors: ``<param>.exp_avg`` and ``<param>.exp_avg_sq`` for each of ``weights``, and one scalar ``step``."""
    moments: Tensors = {_STEP: torch.empty((), dtype=torch.float32, device="meta")}
    for name, weight in weights.items():
        moments[name + _FIRST] = moments[name + _SECOND] = torch.empty_like(weight, device="meta")
    return moments


def adamw_step_in_place(weights: Tensors, moments: Tensors, gradient: Tensors, adam: AdamParams) -> dict[str, float]:
    """The step of :func:`adamw_step` in place on ``weights`` and ``moments`` (zeros before the first), for large ones.

    Parameter by parameter, so that nothing of the size of a model is needed besides; ``gradient`` stays as it is.
    Returns the metrics. Raises Invalid when a weight is not finite afterwards; what was changed is then of no use.
    """
    names = sorted(weights)
    norm = torch.nn.utils.get_total_norm([gradient[name] for name in names if gradient], foreach=False)
    limit = adam.grad_clip_norm if adam.grad_clip_norm > 0 else float("inf")
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    step = moments[_STEP].cpu()
    for name in names:
        parameter = weights[name].detach().requires_grad_()
        parameter.grad = gradient[name] * scale if gradient else torch.zeros_like(parameter)
        optimizer = torch.optim.AdamW(
            [parameter],
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            foreach=False,
        )
        state = {"step": step.clone(), "exp_avg": moments[name + _FIRST], "exp_avg_sq": moments[name + _SECOND]}
        optimizer.state[parameter] = state
        optimizer.step()
    moments[_STEP] += 1
    if not all_finite(weights.values()):
        raise Invalid("non_finite", "the optimizer step made weights that are not finite; nothing was changed.")
    return {"grad_norm": float(norm), "learning_rate": adam.learning_rate}
