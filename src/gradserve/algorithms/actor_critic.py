"""A user's module becomes what PPO trains: observations -> logits, mean and log_std, value."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradserve.algorithms.weights import trained
from gradserve.compute.engine.control.normalise import OBSERVATIONS
from gradserve.wire.control import SpaceSpec
from gradserve.wire.control_defaults import ControlDefaults

_HEADS = ("logits", "mean", "log_std", "value")
_ROWS = 3
"""Of the batch with which a module is tried out."""


class ActorCritic(nn.Module):
    """``policy`` with what it lacks: a critic on the same observations, and a deviation for each mean.

    ``policy`` takes observations [n, features] (float32, flattened as ``gymnasium.spaces.flatten`` does; images uint8
    [n, height, width, channels]) and gives a tensor [n, L + M]: L logits of all that is discrete, then M means of all
    boxes. Or a tuple of that tensor and values, [n] or [n, 1]. Or a dict of logits, mean, log_std and value, where
    log_std ([M] or [n, M]) and value may be missing.

    Raises ValueError, naming the shape that is wanted, for a module that gives anything else.
    """

    def __init__(
        self,
        policy: nn.Module | None,
        observations: SpaceSpec,
        actions: SpaceSpec,
        defaults: ControlDefaults,
        seed: int,
    ) -> None:
        super().__init__()
        self._logits, self._means = actions.num_logits, actions.num_means

        def perceptron(outputs: int, gain: float, seed: int) -> nn.Module:
            widths = [observations.features, *defaults.hidden, outputs]
            layers = multilayer(widths, defaults.activation, gain, seed)
            return nn.Sequential(Pixels(), *layers) if observations.is_image else layers

        self.policy = policy if policy is not None else perceptron(self._logits + self._means, 0.01, seed)
        found = self._tried(observations)
        self.critic: nn.Module | None = None
        self.log_std: nn.Parameter | None = None
        if "value" not in found:
            self.critic = perceptron(1, 1.0, seed + 1)
        if self._means and "log_std" not in found:
            self.log_std = nn.Parameter(torch.full((self._means,), defaults.log_std))

    def forward(self, observations: Tensor) -> dict[str, Tensor]:
        """``logits`` [n, L], ``mean`` [n, M] and ``log_std`` where there are such actions; ``value`` [n]."""
        outputs = self._heads(self.policy(observations))
        assert outputs is not None  # as when it was tried
        if self.log_std is not None:
            outputs["log_std"] = self.log_std
        if self.critic is not None:
            outputs["value"] = self.critic(observations)
        outputs["value"] = outputs["value"].reshape(-1)
        return {name: outputs[name] for name in _HEADS if name in outputs}

    def _tried(self, observations: SpaceSpec) -> dict[str, Tensor]:
        """The outputs for a batch of zeros, with the shapes that they must have."""
        batch = example(observations)
        with torch.no_grad():
            found = self.policy(batch)
        outputs = self._heads(found)
        if outputs is None or not self._fit(outputs):
            raise ValueError(
                f"policy_net gives {_described(found)} for observations {list(batch.shape)}; "
                f"for these spaces it must give {self._wanted()}"
            )
        return outputs

    def _heads(self, found: Any) -> dict[str, Tensor] | None:
        """What the module gave, by the names of a policy's outputs; None where that is not to be told."""
        if isinstance(found, Mapping):
            return dict(found)
        value = {}
        if isinstance(found, (tuple, list)) and len(found) == 2:
            found, value = found[0], {"value": found[1]}
        if not isinstance(found, Tensor) or found.ndim != 2 or found.shape[1] != self._logits + self._means:
            return None
        if not (self._logits and self._means):
            return {"logits" if self._logits else "mean": found} | value
        logits, means = {"logits": found[:, : self._logits]}, {"mean": found[:, self._logits :]}
        return logits | means | value

    def _fit(self, outputs: Mapping[str, Tensor]) -> bool:
        """Whether these are a policy's outputs for a batch of ``_ROWS``."""
        allowed: dict[str, list[tuple[int, ...]]] = {
            "logits": [(_ROWS, self._logits)] if self._logits else [],
            "mean": [(_ROWS, self._means)] if self._means else [],
            "log_std": [(self._means,), (_ROWS, self._means)] if self._means else [],
            "value": [(_ROWS,), (_ROWS, 1)],
        }
        needed = {name for name in ("logits", "mean") if allowed[name]}
        return needed <= outputs.keys() and all(
            isinstance(tensor, Tensor) and tuple(tensor.shape) in allowed.get(name, [])
            for name, tensor in outputs.items()
        )

    def _wanted(self) -> str:
        heads = [(name, width) for name, width in (("logits", self._logits), ("mean", self._means)) if width]
        parts = " then ".join(f"{width} {name}" for name, width in heads)
        return (
            f"a tensor [{_ROWS}, {self._logits + self._means}] ({parts}), a tuple of it and of values [{_ROWS}], or a "
            f"dict of {' and '.join(name for name, _ in heads)} and, from a critic of its own, value"
        )


class NormalisedPolicy(nn.Module):
    """A policy that was trained on normalised observations, and acts on raw ones.

    ``policy`` is the user's module; ``mean``, ``var`` (float64 [features]) are the moments that training saw.
    Observations are flattened as for ActorCritic.
    """

    mean: Tensor
    var: Tensor

    def __init__(self, policy: nn.Module, mean: Tensor, var: Tensor, clip: float) -> None:
        super().__init__()
        self.policy = policy
        self.clip = clip
        self.register_buffer("mean", mean)
        self.register_buffer("var", var)

    def forward(self, observations: Tensor) -> Any:
        """What ``policy`` gives for the observations, normalised as the rollouts' were."""
        scale = (1 / torch.sqrt(self.var + 1e-8)).float()
        return self.policy(((observations - self.mean.float()) * scale).clamp(-self.clip, self.clip))


def policy_of(module: ActorCritic, weights: Mapping[str, Tensor], clip: float) -> nn.Module:
    """The user's module with the weights of a run; with the normaliser in front where the run has one."""
    policy = trained(module, weights).policy
    if OBSERVATIONS + "mean" not in weights:
        return policy
    return NormalisedPolicy(policy, weights[OBSERVATIONS + "mean"], weights[OBSERVATIONS + "var"], clip)


def example(observations: SpaceSpec) -> Tensor:
    """A batch of zeros as a policy sees observations."""
    dtype = torch.uint8 if observations.is_image else torch.float32
    return torch.zeros((_ROWS, *observations.observed_shape), dtype=dtype)


def multilayer(widths: Sequence[int], activation: str, last_gain: float, seed: int) -> nn.Sequential:
    """A perceptron: orthogonal matrices of gain sqrt(2), at the end ``last_gain``, and biases of 0.

    As Stable-Baselines3 begins (detail 2 of Huang et al. 2022): 0.01 for a policy, 1 for a critic.
    """
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        # Without values: making them would draw from the global generator.
        layer: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs)  # type: ignore[no-untyped-call]
        last = number == len(widths) - 2
        nn.init.orthogonal_(layer.weight, last_gain if last else math.sqrt(2), generator=generator)
        nn.init.zeros_(layer.bias)
        layers += [layer] if last else [layer, nn.Tanh() if activation == "tanh" else nn.ReLU()]
    return nn.Sequential(*layers)


class Pixels(nn.Module):
    """Images uint8 [n, ...] as rows of numbers from 0 to 1."""

    def forward(self, images: Tensor) -> Tensor:
        """[n, height * width * channels]"""
        return images.flatten(1).float() / 255


def _described(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"a tensor {list(found.shape)}"
    if isinstance(found, Mapping):
        return "a dict of " + ", ".join(f"{name} {_described(value)}" for name, value in found.items())
    if isinstance(found, (tuple, list)):
        return "a tuple of " + ", ".join(_described(item) for item in found)
    return type(found).__name__
