"""A policy that is asked for actions: what it must give, and what it sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from gradserve.compute.engine.control.distributions import ActionDistribution
from gradserve.compute.engine.control.normalise import OBSERVATIONS, Moments, ObservationNormaliser
from gradserve.compute.engine.control.spaces import Floats
from gradserve.wire.control import RolloutSpec, SpaceSpec
from gradserve.wire.errors import Invalid

VALUE = "value"
"""The policy's output that is the critic's."""


class Policy(Protocol):
    """weights, observations [n, ...] -> ``value`` [n] and the outputs of a distribution of actions (see there)."""

    def __call__(self, weights: Mapping[str, Tensor], observations: Tensor, /) -> Mapping[str, Tensor]: ...


class Actor:
    """A policy with fixed weights, asked for actions."""

    def __init__(
        self,
        policy: Policy,
        weights: Mapping[str, Tensor],
        action_space: SpaceSpec,
        normaliser: ObservationNormaliser | None,
    ) -> None:
        self._policy, self._weights, self._normaliser = policy, weights, normaliser
        self.distribution = ActionDistribution(action_space)

    def see(self, observations: NDArray[Any]) -> NDArray[Any]:
        """Observations [n, ...] as the policy sees them: normalised, a new array, if it does so."""
        return self._normaliser(observations) if self._normaliser else observations

    def __call__(self, seen: NDArray[Any]) -> tuple[dict[str, Tensor], Floats]:
        """The distribution's outputs and the values [n] for what was seen [n, ...]."""
        found = self._policy(self._weights, torch.from_numpy(seen))
        if VALUE not in found or found[VALUE].numel() != len(seen):
            fix = "Give one number per observation, the critic's estimate of the return."
            raise Invalid("bad_policy", "value: a policy gives [n] values.", field="policy", fix=fix)
        return self.distribution.outputs(found, len(seen)), found[VALUE].reshape(-1).numpy()


def normaliser_for(weights: Mapping[str, Tensor], spec: RolloutSpec, space: SpaceSpec) -> ObservationNormaliser | None:
    """The one that the weights carry, if ``spec`` asks for it. Raises Invalid for images."""
    if not spec.normalise_observations:
        return None
    if space.is_image:
        fix = "Let the policy divide by 255."
        raise Invalid("bad_control", "images are not normalised.", field="normalise_observations", fix=fix)
    return ObservationNormaliser(Moments.read(weights, OBSERVATIONS, space.observed_shape), spec.clip_observation)


def as_arrays(outputs: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    """The same numbers for numpy."""
    return {name: tensor.numpy() for name, tensor in outputs.items()}
