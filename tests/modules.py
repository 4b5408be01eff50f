"""Small modules of the kinds that people train, each with a batch to capture it by."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ActorCritic(nn.Module):
    """An MLP with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.actor = nn.Linear(16, 2)
        self.critic = nn.Linear(16, 1)

    def forward(self, obs: Tensor) -> dict[str, Tensor]:
        hidden = self.body(obs)
        return {"logits": self.actor(hidden), "value": self.critic(hidden).squeeze(-1)}


class Convolutional(nn.Module):
    """A CNN with normalisation by statistics that are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * 4 * 4, 3),
        )

    def forward(self, image: Tensor) -> Tensor:
        found: Tensor = self.layers(image)
        return found


class Recurrent(nn.Module):
    """A GRU whose last state is read."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(5, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(x)
        found: Tensor = self.head(states[:, -1])
        return found


class Transformer(nn.Module):
    """Tokens through attention to logits; head and embedding share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.block(self.embedding(ids)))
        return found


def examples() -> dict[str, tuple[nn.Module, Tensor]]:
    """Every module above, seeded, in evaluation mode, with a batch of its inputs."""
    torch.manual_seed(7)
    return {
        "mlp": (ActorCritic().eval(), torch.randn(3, 4)),
        "cnn": (_with_statistics(Convolutional()), torch.randn(3, 1, 8, 8)),
        "gru": (Recurrent().eval(), torch.randn(3, 6, 5)),
        "transformer": (Transformer().eval(), torch.randint(0, 11, (3, 7))),
    }


def _with_statistics(module: nn.Module) -> nn.Module:
    """Buffers that are not what they started as."""
    module(torch.randn(8, 1, 8, 8) * 2 + 1)
    return module.eval()
