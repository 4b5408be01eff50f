# mypy: disable-error-code="no-any-return"
"""Losses that can't be graphs. The line at fault ends in a comment that names a part of the cure."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

TRAINED = torch.nn.Parameter(torch.ones(1))


def branches_on_a_value(logprobs: Tensor) -> Tensor:
    total = logprobs.sum()
    if total > 0:  # cure: torch.where
        return total
    return -total


def asserts_a_value(logprobs: Tensor) -> Tensor:
    assert (logprobs <= 0).all()  # cure: torch.where
    return logprobs.sum()


def takes_an_item(logprobs: Tensor) -> tuple[Tensor, dict[str, float]]:
    total = logprobs.sum()
    return total, {"mean": logprobs.mean().item()}  # cure: return tensors


def takes_a_float(logprobs: Tensor) -> Tensor:
    scale = float(logprobs.max())  # cure: return tensors
    return logprobs.sum() / scale


def takes_a_list(logprobs: Tensor) -> Tensor:
    return logprobs.sum() * len(logprobs[0].tolist())  # cure: return tensors


def uses_numpy(logprobs: Tensor) -> Tensor:
    ratio = np.exp(logprobs)  # cure: torch.exp for np.exp
    return torch.as_tensor(ratio).sum()


def detaches_to_numpy(logprobs: Tensor) -> Tensor:
    return logprobs.sum() * logprobs.detach().numpy().mean()  # cure: torch.exp for np.exp


def indexes_by_a_mask(logprobs: Tensor, mask: Tensor) -> Tensor:
    return -logprobs[mask > 0].mean()  # cure: (x * mask).sum()


def selects_by_a_mask(logprobs: Tensor, mask: Tensor) -> Tensor:
    return torch.masked_select(logprobs, mask > 0).sum()  # cure: masks


def finds_nonzero(logprobs: Tensor, mask: Tensor) -> Tensor:
    rows, columns = torch.where(mask > 0)  # cure: masks
    return logprobs[rows, columns].sum()


def assigns_to_a_part(logprobs: Tensor) -> Tensor:
    scaled = logprobs * 2
    scaled[:, 0] = 0  # cure: masked_fill
    return scaled.sum()


def writes_what_another_name_sees(logprobs: Tensor) -> Tensor:
    scaled = logprobs * 2
    flat = scaled.view(-1)
    scaled.mul_(2)  # cure: torch.cat
    return flat.sum()


def writes_into_an_input(logprobs: Tensor, advantages: Tensor) -> Tensor:
    advantages -= advantages.mean()  # cure: x = x + y
    return -(logprobs * advantages).sum()


def draws_random_numbers(logprobs: Tensor) -> Tensor:
    return (logprobs * torch.rand_like(logprobs)).sum()  # cure: send them as an input


def drops_out(logprobs: Tensor) -> Tensor:
    return F.dropout(logprobs, 0.1).sum()  # cure: p=0


def loops_over_the_tokens(logprobs: Tensor) -> Tensor:
    total = logprobs[:, 0].sum()
    for i in range(1, logprobs.shape[1]):  # cure: cumsum
        total = total + 0.9**i * logprobs[:, i].sum()
    return total


def loops_over_the_rows(logprobs: Tensor) -> Tensor:
    return torch.stack([row.sum() for row in logprobs]).mean()  # cure: cumsum


def takes_the_length(logprobs: Tensor) -> Tensor:
    return logprobs.sum() / len(logprobs)  # cure: x.shape[i]


def makes_a_number_of_a_size(logprobs: Tensor) -> Tensor:
    return logprobs.sum() / math.sqrt(logprobs.shape[1])  # cure: T ** 0.5


def branches_on_a_size(logprobs: Tensor) -> Tensor:
    if logprobs.shape[1] > 10:  # cure: right for all sizes
        return logprobs.sum()
    return logprobs.mean()


def uses_a_trained_tensor(logprobs: Tensor) -> Tensor:
    return (logprobs * TRAINED).sum()  # cure: capture the module


def sorts_out_unique_values(logprobs: Tensor, group: Tensor) -> Tensor:
    return logprobs.sum() * torch.unique(group).sum()  # cure: masks


def uses_what_is_not_allowed(logprobs: Tensor) -> Tensor:
    return torch.linalg.svdvals(logprobs).sum()  # cure: linalg_svd


def returns_no_scalar(logprobs: Tensor) -> Tensor:  # cure: End with .sum()
    return logprobs


def returns_a_metric_that_is_no_scalar(logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:  # cure: .mean()
    return logprobs.sum(), {"all": logprobs}


def takes_any_number_of_inputs(*logprobs: Tensor) -> Tensor:  # cure: a parameter of its own
    return logprobs[0].sum()
