"""A user's module becomes what PPO trains: observations -> logits, mean and log_std, value."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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
        widths = [observations.features, *defaults.hidden]
        heads = self._logits + self._means
        self.policy = policy if policy is not None else multilayer([*widths, heads], defaults.activation, 0.01, seed)
        found = self._tried(observations)
        self.critic: nn.Module | None = None
        self.log_std: nn.Parameter | None = None
        if "value" not in found:
            self.critic = multilayer([*widths, 1], defaults.activation, 1.0, seed + 1)
        if self._means and "log_std" not in found:
            self.log_std = nn.Parameter(torch.full((self._means,), defaults.log_std))

    def forward(self, observations: Tensor) -> dict[str, Tensor]:
        """``logits`` [n, L], ``mean`` [n, M] and ``log_std`` where there are such actions; ``value`` [n]."""
        outputs = self._heads(self.policy(observations))
        if self.log_std is not None:
            outputs["log_std"] = self.log_std
        if self.critic is not None:
            outputs["value"] = self.critic(_flat(observations))
        outputs["value"] = outputs["value"].reshape(-1)
        return {name: outputs[name] for name in _HEADS if name in outputs}

    def _tried(self, observations: SpaceSpec) -> dict[str, Tensor]:
        """The outputs for a batch of zeros, looked at."""
        with torch.no_grad():
            found = self.policy(example(observations))
        try:
            outputs = self._heads(found)
            wanted = {"logits": self._logits, "mean": self._means, "log_std": self._means, "value": 1}
            for name, tensor in outputs.items():
                if tensor.shape not in _shapes(name, wanted[name]):
                    raise ValueError(name)
            if any(wanted[name] and name not in outputs for name in ("logits", "mean")):
                raise ValueError("missing")
        except ValueError:
            raise ValueError(
                f"policy_net gives {_described(found)} for observations {list(example(observations).shape)}; "
                f"these actions take {self._wanted()}"
            ) from None
        return outputs

    def _heads(self, found: Any) -> dict[str, Tensor]:
        if isinstance(found, Mapping):
            outputs = dict(found)
            if not outputs.keys() <= set(_HEADS):
                raise ValueError("unknown")
            return outputs
        value = {}
        if isinstance(found, (tuple, list)):
            if len(found) != 2:
                raise ValueError("tuple")
            found, value = found[0], {"value": found[1]}
        if not isinstance(found, Tensor) or found.ndim != 2 or found.shape[1] != self._logits + self._means:
            raise ValueError("width")
        heads = {"logits": found[:, : self._logits]} if self._logits else {}
        return heads | ({"mean": found[:, self._logits :]} if self._means else {}) | value

    def _wanted(self) -> str:
        parts = [f"{width} {name}" for name, width in (("logits", self._logits), ("means", self._means)) if width]
        shape = f"[{_ROWS}, {self._logits + self._means}]"
        return (
            f"a tensor {shape} ({' then '.join(parts)}), a tuple of it and of values [{_ROWS}], or a dict of "
            f"{' and '.join(name for name, width in (('logits', self._logits), ('mean', self._means)) if width)}, "
            "with value if the module has a critic"
        )


class NormalisedPolicy(nn.Module):
    """A policy that was trained on normalised observations, and acts on raw ones.

    ``policy`` is the user's module; ``mean``, ``var`` (float64 [features]) are the moments that training saw. Observations
    are flattened as for ActorCritic.
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


def trained(module: ActorCritic, weights: Mapping[str, Tensor]) -> ActorCritic:
    """A copy with the weights of a run; the normaliser's are not among a module's own."""
    copied = copy.deepcopy(module)
    copied.load_state_dict({name: value for name, value in weights.items() if not name.startswith(OBSERVATIONS)})
    return copied


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
        layer = nn.utils.skip_init(nn.Linear, inputs, outputs)  # leaves the global generator alone
        last = number == len(widths) - 2
        nn.init.orthogonal_(layer.weight, last_gain if last else math.sqrt(2), generator=generator)
        nn.init.zeros_(layer.bias)
        layers += [layer] if last else [layer, nn.Tanh() if activation == "tanh" else nn.ReLU()]
    return nn.Sequential(*layers)


def _flat(observations: Tensor) -> Tensor:
    return observations if observations.ndim == 2 else observations.flatten(1).float() / 255


def _shapes(name: str, width: int) -> list[tuple[int, ...]]:
    return {"value": [(_ROWS,), (_ROWS, 1)], "log_std": [(width,), (_ROWS, width)]}.get(name, [(_ROWS, width)])


def _described(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"a tensor {list(found.shape)}"
    if isinstance(found, Mapping):
        return "a dict of " + ", ".join(f"{name} {_described(value)}" for name, value in found.items())
    if isinstance(found, (tuple, list)):
        return "a tuple of " + ", ".join(_described(item) for item in found)
    return type(found).__name__
