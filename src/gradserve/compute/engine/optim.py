"""One optimizer step: torch's own AdamW on arrays that come from objects and go back to objects."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gradserve.compute.engine.finite import all_finite
from gradserve.compute.engine.lora import Tensors
from gradserve.wire.errors import Invalid
from gradserve.wire.ops import AdamParams

_STEP = "step"
_FIRST, _SECOND = ".exp_avg", ".exp_avg_sq"


def fold(gradients: Iterable[Tensors]) -> Tensors:
    """The sum from left to right; a fixed order makes the bits independent of who finished first.

    Of one gradient it is that very dict: do not change it.
    """
    total: Tensors = {}
    owned = False
    for gradient in gradients:
        if not total:
            total = gradient
        elif total.keys() != gradient.keys():
            raise Invalid("mixed_gradients", "these gradients belong to different adapters")
        elif owned:
            for name, tensor in gradient.items():
                total[name].add_(tensor)
        else:
            total, owned = {name: total[name] + tensor for name, tensor in gradient.items()}, True
    return total


def adamw_step(
    weights: Tensors, moments: Tensors | None, gradient: Tensors, adam: AdamParams
) -> tuple[Tensors, Tensors, dict[str, float]]:
    """New weights, new moments and metrics; nothing given is changed. No gradient at all counts as zeros.

    Moments hold ``<param>.exp_avg``, ``<param>.exp_avg_sq`` and one scalar ``step``. The clip is on the global
    norm of the whole sum. Raises Invalid when the step leaves a weight that is not finite.
    """
    # Sorted: the order enters the norm's last bits, and must not depend on where the dict came from.
    names = sorted(weights)
    shapes = {name: weights[name].shape for name in names}
    parameter = _flat(weights, names).requires_grad_()
    parameter.grad = _flat(gradient, names) if gradient else torch.zeros_like(parameter)
    limit = adam.grad_clip_norm if adam.grad_clip_norm > 0 else float("inf")
    norm = torch.nn.utils.clip_grad_norm_([parameter], limit)
    optimizer = _adamw(parameter, adam, fused=True)
    optimizer.state[parameter] = _state(moments, names, parameter)
    optimizer.step()
    if not all_finite([parameter]):
        raise Invalid("non_finite", "the optimizer step made weights that are not finite; nothing was changed.")
    state = optimizer.state[parameter]
    new_moments = _split(state["exp_avg"], shapes, _FIRST) | _split(state["exp_avg_sq"], shapes, _SECOND)
    metrics = {"grad_norm": norm.item(), "learning_rate": adam.learning_rate}
    return _split(parameter.detach(), shapes), new_moments | {_STEP: state["step"]}, metrics


def _adamw(parameter: Tensor, adam: AdamParams, fused: bool) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        [parameter],
        lr=adam.learning_rate,
        betas=(adam.beta1, adam.beta2),
        eps=adam.eps,
        weight_decay=adam.weight_decay,
        foreach=False,
        fused=fused,
    )


def _flat(tensors: Tensors, names: list[str], suffix: str = "") -> Tensor:
    """All as one vector: AdamW works element by element, and hundreds of small tensors cost a call each."""
    return torch.cat([tensors[name + suffix].reshape(-1) for name in names])


def _split(flat: Tensor, shapes: dict[str, torch.Size], suffix: str = "") -> Tensors:
    parts = torch.split(flat, [shape.numel() for shape in shapes.values()])
    return {name + suffix: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def _state(moments: Tensors | None, names: list[str], parameter: Tensor) -> Tensors:
    if moments is None:
        step = torch.tensor(0.0, device=parameter.device)
        return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
    return {
        "step": moments[_STEP].clone(),
        "exp_avg": _flat(moments, names, _FIRST),
        "exp_avg_sq": _flat(moments, names, _SECOND),
    }


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
        optimizer = _adamw(parameter, adam, fused=False)
        state = {"step": step.clone(), "exp_avg": moments[name + _FIRST], "exp_avg_sq": moments[name + _SECOND]}
        optimizer.state[parameter] = state
        optimizer.step()
    moments[_STEP] += 1
    if not all_finite(weights.values()):
        raise Invalid("non_finite", "the optimizer step made weights that are not finite; nothing was changed.")
    return {"grad_norm": float(norm), "learning_rate": adam.learning_rate}
