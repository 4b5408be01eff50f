"""One optimizer step: torch's own optimizers on arrays that come from objects and go back to objects."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gradserve.compute.engine.finite import all_finite
from gradserve.compute.engine.lora import Tensors
from gradserve.wire.errors import Invalid
from gradserve.wire.ops import AdamParams, SgdParams

_STEP = "step"
_FIRST, _SECOND = ".exp_avg", ".exp_avg_sq"
_MOMENTUM = ".momentum_buffer"


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


Rule = AdamParams | SgdParams


def optimizer_step(
    weights: Tensors, moments: Tensors | None, gradient: Tensors, rule: Rule, coupled_decay: bool = False
) -> tuple[Tensors, Tensors, dict[str, float]]:
    """New weights, new moments and metrics; nothing given is changed. No gradient at all counts as zeros.

    What has no gradient while others do (a module's buffers) stays as it is. Of Adam's kinds moments hold
    ``<param>.exp_avg``, ``<param>.exp_avg_sq`` and one scalar ``step``; of SGD ``<param>.momentum_buffer``, ``step``.
    Other entries of ``moments`` are passed on. The clip is on the global norm of the whole sum. Raises Invalid when the
    step leaves a weight that is not finite, or ``moments`` are another optimizer's.
    """
    # Sorted: the order enters the norm's last bits, and must not depend on where the dict came from.
    names = sorted(gradient or weights)
    shapes = {name: weights[name].shape for name in names}
    parameter = _flat(weights, names).requires_grad_()
    parameter.grad = _flat(gradient, names) if gradient else torch.zeros_like(parameter)
    limit = rule.grad_clip_norm if rule.grad_clip_norm > 0 else float("inf")
    norm = torch.nn.utils.clip_grad_norm_([parameter], limit)
    suffixes = (_MOMENTUM,) if isinstance(rule, SgdParams) else (_FIRST, _SECOND)
    optimizer = _optimizer(parameter, rule, coupled_decay, fused=True)
    state = _state(moments, names, parameter, suffixes)
    step = state.pop(_STEP)
    optimizer.state[parameter] = _for_torch(rule, state, step, fresh=moments is None)
    optimizer.step()
    if not all_finite([parameter]):
        raise Invalid("non_finite", "the optimizer step made weights that are not finite; nothing was changed.")
    found = optimizer.state[parameter]
    new_moments = _others(moments, names, suffixes)
    for suffix in suffixes:
        buffer = found.get(suffix.removeprefix("."))
        new_moments |= _split(torch.zeros_like(parameter) if buffer is None else buffer, shapes, suffix)
    new_moments[_STEP] = step + 1 if isinstance(rule, SgdParams) else found["step"]
    metrics = {"grad_norm": norm.item(), "learning_rate": rule.learning_rate}
    return weights | _split(parameter.detach(), shapes), new_moments, metrics


def adamw_step(
    weights: Tensors, moments: Tensors | None, gradient: Tensors, adam: AdamParams
) -> tuple[Tensors, Tensors, dict[str, float]]:
    """:func:`optimizer_step` of AdamW."""
    return optimizer_step(weights, moments, gradient, adam)


def _optimizer(parameter: Tensor, rule: Rule, coupled_decay: bool, fused: bool) -> torch.optim.Optimizer:
    if isinstance(rule, SgdParams):
        return torch.optim.SGD(
            [parameter],
            lr=rule.learning_rate,
            momentum=rule.momentum,
            dampening=rule.dampening,
            nesterov=rule.nesterov,
            weight_decay=rule.weight_decay,
            foreach=False,
            fused=fused,
        )
    kind = torch.optim.Adam if coupled_decay else torch.optim.AdamW
    return kind(
        [parameter],
        lr=rule.learning_rate,
        betas=(rule.beta1, rule.beta2),
        eps=rule.eps,
        weight_decay=rule.weight_decay,
        foreach=False,
        fused=fused,
    )


def _for_torch(rule: Rule, state: Tensors, step: Tensor, *, fresh: bool) -> dict[str, Tensor]:
    """The state as torch keeps it. SGD has none before its first step, which takes the gradient as the momentum."""
    if not isinstance(rule, SgdParams):
        return {"step": step, "exp_avg": state[_FIRST], "exp_avg_sq": state[_SECOND]}
    return {} if fresh or not rule.momentum else {"momentum_buffer": state[_MOMENTUM]}


def _others(moments: Tensors | None, names: list[str], suffixes: tuple[str, ...]) -> Tensors:
    """What moments hold for somebody else (states of environments)."""
    mine = {name + suffix for name in names for suffix in suffixes} | {_STEP}
    return {name: tensor for name, tensor in (moments or {}).items() if name not in mine}


def _flat(tensors: Tensors, names: list[str], suffix: str = "") -> Tensor:
    """All as one vector: AdamW works element by element, and hundreds of small tensors cost a call each."""
    return torch.cat([tensors[name + suffix].reshape(-1) for name in names])


def _split(flat: Tensor, shapes: dict[str, torch.Size], suffix: str = "") -> Tensors:
    parts = torch.split(flat, [shape.numel() for shape in shapes.values()])
    return {name + suffix: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def _state(moments: Tensors | None, names: list[str], parameter: Tensor, suffixes: tuple[str, ...]) -> Tensors:
    if moments is None:
        zeros = {suffix: torch.zeros_like(parameter) for suffix in suffixes}
        return {_STEP: torch.tensor(0.0, device=parameter.device), **zeros}
    if any(name + suffix not in moments for name in names for suffix in suffixes):
        raise Invalid(
            "other_optimizer",
            "the moments of this run are another optimizer's.",
            fix="Go on with the same optimizer, or load the weights without their moments (optimizer=False).",
        )
    return {_STEP: moments[_STEP].clone(), **{suffix: _flat(moments, names, suffix) for suffix in suffixes}}


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
        optimizer = _optimizer(parameter, adam, False, fused=False)
        state = {"step": step.clone(), "exp_avg": moments[name + _FIRST], "exp_avg_sq": moments[name + _SECOND]}
        optimizer.state[parameter] = state
        optimizer.step()
    moments[_STEP] += 1
    if not all_finite(weights.values()):
        raise Invalid("non_finite", "the optimizer step made weights that are not finite; nothing was changed.")
    return {"grad_norm": float(norm), "learning_rate": adam.learning_rate}
