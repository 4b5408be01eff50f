"""Any algorithm of one's own: what to learn from, and the loss. The service does the rest.

python examples/fit_regression.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import gradserve


class Sine:
    """Learn sin(x) on [-3, 3] from noisy samples."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.rand(1000, 1, generator=generator) * 6 - 3
        self.y = torch.sin(self.x) + 0.05 * torch.randn(1000, 1, generator=generator)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))

    def data_loader(self, batch_size: int) -> Iterator[dict[str, Tensor]]:
        """One epoch; the last batch is smaller."""
        for x, y in zip(self.x.split(batch_size), self.y.split(batch_size), strict=True):
            yield {"x": x, "y": y}

    def loss_fn(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean squared error, and how far off the worst sample is."""
        error = model(batch["x"]) - batch["y"]
        return error.square().mean(), {"worst": error.abs().max()}


def main() -> None:
    """Fit, then ask for sin(pi/2)."""
    fitted = gradserve.fit(Sine(), epochs=20, batch_size=64, optimizer="adamw", learning_rate=1e-2)
    first, last = fitted.history[0], fitted.history[-1]
    print(f"{len(fitted.history)} steps: loss {first['loss']:.3f} -> {last['loss']:.3f}, worst {last['worst']:.2f}")
    print(f"sin(pi/2) = {fitted.model(torch.tensor([[torch.pi / 2]])).item():.2f}")


if __name__ == "__main__":
    main()
