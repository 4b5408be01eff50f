"""Losses and policies as users write them, and what they give when run as Python and as graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradserve.compute.engine.graphs import Executable
from gradserve.wire.graph import Graph, decode, encode

Metrics = dict[str, Tensor]


def ppo_clip(logprobs: Tensor, mask: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: float = 0.2) -> Tensor:
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return -(torch.minimum(ratio * advantages, clipped * advantages) * mask).sum() / mask.sum()


def grpo(
    logprobs: Tensor, mask: Tensor, old_logprobs: Tensor, reference: Tensor, rewards: Tensor, group_size: int = 4
) -> tuple[Tensor, Metrics]:
    """Group-normalised rewards and the k3 estimator of the KL to a reference."""
    with torch.no_grad():
        groups = rewards.view(-1, group_size)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    ratio = (logprobs - old_logprobs).exp()
    gap = reference - logprobs
    kl = gap.exp() - gap - 1
    per_token = -ratio * advantages.reshape(-1, 1) + 0.04 * kl
    loss = ((per_token * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()
    return loss, {"kl": (kl * mask).sum() / mask.sum(), "advantage": advantages.abs().mean()}


def cispo(logprobs: Tensor, mask: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    weight = (logprobs - old_logprobs).exp().clamp(max=4.0).detach()
    return -(weight * logprobs * advantages * mask).sum()


def entropy_and_kl(logprobs: Tensor, mask: Tensor, entropy: Tensor, old_logprobs: Tensor) -> Tensor:
    total = (logprobs * mask).sum()
    total -= 0.01 * (entropy * mask).sum()
    total += 0.1 * ((logprobs - old_logprobs).square() * mask).sum()
    return total


def dpo(logprobs: Tensor, mask: Tensor, reference: Tensor) -> tuple[Tensor, Metrics]:
    """Rows alternate: chosen, rejected."""
    margin = ((logprobs - reference) * mask).sum(1)
    logits = 0.1 * (margin[0::2] - margin[1::2])
    return -F.logsigmoid(logits).mean(), {"accuracy": (logits > 0).float().mean()}


def by_lengths(logprobs: Tensor, lengths: Tensor) -> Tensor:
    positions = torch.arange(logprobs.shape[1])[None, :]
    inside = (positions < lengths[:, None]).to(logprobs.dtype)
    loss: Tensor = -(logprobs * inside).sum() / logprobs.shape[1] ** 0.5
    return loss


LOSSES: list[Callable[..., Any]] = [ppo_clip, grpo, cispo, entropy_and_kl, dpo, by_lengths]


class ActorCritic(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.LayerNorm(16))
        self.policy = nn.Linear(16, 2)
        self.value = nn.Linear(16, 1)
        self.log_std = nn.Parameter(torch.zeros(2))
        self.register_buffer("mean", torch.full((4,), 0.1))

    def forward(self, observation: Tensor) -> dict[str, Tensor]:
        features = self.body(observation - self.mean)
        return {
            "mean": self.policy(features),
            "std": self.log_std.exp(),
            "value": self.value(features).squeeze(-1),
        }


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        )
        self.head = nn.Linear(72, 5)

    def forward(self, image: Tensor) -> Tensor:
        output: Tensor = self.head(self.layers(image / 255))
        return output


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.GRU] | type[nn.LSTM]) -> None:
        super().__init__()
        self.cell = cell(4, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, sequence: Tensor) -> tuple[Tensor, Tensor]:
        hidden, last = self.cell(sequence)
        return self.head(hidden[:, -1]), last[0] if isinstance(last, tuple) else last


class Transformer(nn.Module):
    """Its head is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        output: Tensor = self.head(self.layer(self.embedding(ids), src_mask=mask))
        return output


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.drop(self.norm(x)))
        return output


def policies() -> dict[str, tuple[nn.Module, Tensor]]:
    """Modules with a batch of three."""
    torch.manual_seed(0)
    normalised = Normalised()
    normalised(torch.randn(32, 4))  # statistics other than 0 and 1
    return {
        "actor-critic": (ActorCritic(), torch.randn(3, 4)),
        "cnn": (Convolutional(), torch.rand(3, 3, 19, 19) * 255),
        "gru": (Recurrent(nn.GRU), torch.randn(3, 5, 4)),
        "lstm": (Recurrent(nn.LSTM), torch.randn(3, 5, 4)),
        "transformer": (Transformer(), torch.randint(0, 11, (3, 7))),
        "batch-norm": (normalised.eval(), torch.randn(3, 4)),
    }


def sent(graph: Graph) -> Executable:
    """The graph as a server makes it runnable: from its text."""
    return Executable(decode(encode(graph)), max_constant_bytes=1 << 22)


def values_for(graph: Graph, rows: int, tokens: int, seed: int = 0) -> dict[str, Tensor]:
    """Random inputs of a loss; a mask has ones and zeros, lengths are within 1..tokens."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"B": rows, "T": tokens}
    found = {}
    for given in graph.inputs:
        shape = [sizes[size] if isinstance(size, str) else size for size in given.shape]
        if given.dtype == "int64":
            found[given.name] = torch.randint(1, tokens + 1, shape, generator=generator)
        elif given.name == "mask":
            found[given.name] = (torch.rand(shape, generator=generator) > 0.3).float()
            found[given.name][:, 0] = 1.0
        else:
            found[given.name] = torch.randn(shape, generator=generator)
    return found


def leaves(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies that collect gradients, where the dtype allows it."""
    return {name: value.clone().requires_grad_(value.is_floating_point()) for name, value in values.items()}


def gradients(values: dict[str, Tensor]) -> dict[str, Tensor | None]:
    return {name: value.grad for name, value in values.items()}


def same_bits(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and torch.equal(left, right)
