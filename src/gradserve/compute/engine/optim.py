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


def moments_like(weights: Tensors) -> Tensors:
    """Meta tensors: ``<param>.exp_avg`` and ``<param>.exp_avg_sq`` for each of ``weights``, and one scalar ``step``."""
    moments: Tensors = {_STEP: torch.empty((), dtype=torch.float32, device="meta")}
    for name, weight in weights.items():
        moments[name + _FIRST] = moments[name + _SECOND] = torch.empty_like(weight, device="meta")
    return moments


def adamw_step(weights: Tensors, moments: Tensors, gradient: Tensors, adam: AdamParams) -> dict[str, float]:
    """One step in place on ``weights`` and ``moments`` (zeros before the first step), which uses up ``gradient``.

    Returns the metrics. No gradient at all counts as zeros. The clip is on the global norm of the whole sum. Raises
    Invalid when the step leaves a weight that is not finite; what it was given is then of no use.
    """
    # Sorted: the order enters the norm's last bits, and must not depend on where the dict came from.
    parameters = {name: weights[name].detach().requires_grad_() for name in sorted(weights)}
    for name, parameter in parameters.items():
        parameter.grad = gradient[name] if gradient else torch.zeros_like(parameter)
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
    step = moments[_STEP].cpu()
    for name, parameter in parameters.items():
        # Each parameter counts for itself, so each gets a counter of its own.
        state = {"step": step.clone(), "exp_avg": moments[name + _FIRST], "exp_avg_sq": moments[name + _SECOND]}
        optimizer.state[parameter] = state
    optimizer.step()
    moments[_STEP] += 1
    if not all(bool(parameter.isfinite().all()) for parameter in parameters.values()):
        raise Invalid("non_finite", "the optimizer step made weights that are not finite; nothing was changed.")
    return {"grad_norm": norm.item(), "learning_rate": adam.learning_rate}
