"""Losses over pairs of rows, chosen and rejected in turn, in plain PyTorch: beside the weights, or on the client.

Of a pair with log-probs c and r and reference log-probs c0 and r0, h = (c - c0) - (r - r0):

dpo      -log sigmoid(beta h)                           Rafailov et al. 2023, arXiv:2305.18290, equation 7
ipo      (h - 1 / (2 beta))^2                           Azar et al. 2023, arXiv:2310.12036, equation 17
bradley_terry  -log sigmoid(s(c) - s(r)), s(x) = log p / (1 - p) with p = e^x

A loss is the sum over the pairs of ``share`` times that, so that requests add up to a batch's mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.nn.utils.rnn import pad_sequence

LARGEST = -1e-6
"""Log-probs nearer to 0 are taken as this one: the log-odds of certainty are infinite."""


def dpo(logprobs: Tensor, weights: Tensor, reference: Tensor, share: Tensor, beta: float = 0.1) -> Tensor:
    """``logprobs``, ``weights`` [B, T], 0 beyond a row's end; ``reference``, ``share`` [B]."""
    change = (logprobs * weights).sum(1) - reference
    return -(share[0::2] * logsigmoid(beta * (change[0::2] - change[1::2]))).sum()


def ipo(logprobs: Tensor, weights: Tensor, reference: Tensor, share: Tensor, beta: float = 0.1) -> Tensor:
    """As dpo. Log-probs are summed over tokens, as in the paper, not averaged."""
    change = (logprobs * weights).sum(1) - reference
    return (share[0::2] * (change[0::2] - change[1::2] - 1 / (2 * beta)) ** 2).sum()


def bradley_terry(logprobs: Tensor, weights: Tensor, share: Tensor) -> Tensor:
    """As dpo; each row's weight is 1 on the one token whose log-odds are its score, and 0 elsewhere."""
    picked = (logprobs * weights).sum(1).clamp(max=LARGEST)
    score = picked - torch.log(1 - torch.exp(picked))
    return -(share[0::2] * logsigmoid(score[0::2] - score[1::2])).sum()


def on_client(loss: Callable[..., Tensor], weights: Sequence[Sequence[float]], **given: Any) -> Callable[..., Any]:
    """For the SDK's forward_backward_custom: ``loss`` of rows whose inputs are ``weights`` [N] each and ``given`` [B].

    Floats that are given as one number are the loss's settings.
    """
    inputs = {"weights": pad_sequence([torch.tensor(row) for row in weights], batch_first=True)}
    inputs |= {name: torch.tensor(value) if isinstance(value, list) else value for name, value in given.items()}

    def custom(data: Sequence[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        found = loss(logprobs=pad_sequence(logprobs, batch_first=True), **inputs)
        return found, {}  # the SDK adds the loss

    return custom
