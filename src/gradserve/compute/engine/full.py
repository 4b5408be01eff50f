"""Full fine-tuning by the same Tasks as adapters: a run's weights are all parameters of its base.

A weights object holds every parameter once, float32, under its Hugging Face name, so that it *is* a model.safetensors.
The base in memory stays frozen; its parameters are exchanged for the time of a Task and nothing of them is kept.
"""

from __future__ import annotations

import torch

from gradserve.compute.combine import combine
from gradserve.compute.engine.base import Base
from gradserve.compute.engine.lora import Tensors
from gradserve.compute.engine.train import RECOMPUTE_TOKENS, check_gradient, evaluate, pack
from gradserve.wire.data import Row
from gradserve.wire.results import ForwardBackwardResult


def forward(
    base: Base, weights: Tensors, passes: list[list[Row]], loss: str, config: dict[str, float]
) -> ForwardBackwardResult:
    """Log-probs and loss of all rows. Raises Invalid as train.forward_backward."""
    with torch.no_grad(), base.parameters.replaced(weights):
        return combine([evaluate(base, None, pack(rows, base.device), loss, config)[1] for rows in passes])


def forward_backward(
    base: Base,
    weights: Tensors,
    passes: list[list[Row]],
    loss: str,
    config: dict[str, float],
    gradient: Tensors,
) -> ForwardBackwardResult:
    """The same, and the loss's gradient, which is added to ``gradient`` (zeros, under the names of ``weights``).

    One pass after the other adds its share in place: a gradient is as large as the model, and more than one of them at
    a time would be memory for nothing.
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}
    for name, leaf in leaves.items():
        leaf.grad = gradient[name]
    results = []
    with base.parameters.replaced(leaves):
        for rows in passes:
            packed = pack(rows, base.device)
            with base.recomputing(packed.tokens.numel() > RECOMPUTE_TOKENS):
                terms, result = evaluate(base, None, packed, loss, config)
                torch.autograd.backward(terms.sum())
            results.append(result)
    check_gradient(gradient)
    return combine(results)
