"""Observations as Gymnasium flattens them; actions as its spaces contain them."""

from __future__ import annotations

from typing import Any

import gymnasium
import msgspec
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from numpy.typing import NDArray

from gradserve.compute.engine.control.spaces import ActionDecoder, encode, spec_of
from gradserve.wire.control import SpaceSpec
from gradserve.wire.errors import Invalid

SPACES: dict[str, gymnasium.Space[Any]] = {
    "box": spaces.Box(-1, 1, (2, 3)),
    "float64": spaces.Box(-np.inf, np.inf, (3,), np.float64),
    "whole box": spaces.Box(0, 7, (2,), np.int64),
    "bounds by element": spaces.Box(np.array([-1.0, -np.inf]), np.array([2.0, 0.5]), dtype=np.float64),
    "scalar": spaces.Box(0, 1, ()),
    "discrete": spaces.Discrete(5, start=2),
    "multi discrete": spaces.MultiDiscrete(np.array([[2, 3], [4, 2]]), start=np.array([[0, 5], [1, 0]])),
    "multi binary": spaces.MultiBinary([2, 2]),
    "nested": spaces.Dict(
        {
            "z": spaces.Discrete(3),
            "a": spaces.Tuple((spaces.MultiBinary(2), spaces.Box(-2, 2, (2,), np.float64))),
            "m": spaces.MultiDiscrete([2, 2]),
        }
    ),
}
every_space = pytest.mark.parametrize("space", SPACES.values(), ids=list(SPACES))


def batched(space: gymnasium.Space[Any], samples: list[Any]) -> Any:
    empty: Any = create_empty_array(space, len(samples))
    return concatenate(space, samples, empty)


@every_space
def test_observations_are_flattened_as_gymnasium_does(space: gymnasium.Space[Any]) -> None:
    space.seed(0)
    samples = [space.sample() for _ in range(4)]
    flat: list[Any] = [spaces.flatten(space, sample) for sample in samples]
    expected = np.stack(flat).astype(np.float32)
    spec = spec_of(space)
    rows = np.stack([encode(spec, sample) for sample in samples])
    assert rows.dtype == np.float32
    assert np.array_equal(rows, expected)
    assert np.array_equal(encode(spec, batched(space, samples), lead=1), expected)
    assert spec.observed_shape == expected.shape[1:]


def test_images_stay_as_they_are() -> None:
    space = spaces.Box(0, 255, (4, 6, 3), np.uint8)
    sample = space.sample()
    assert encode(spec_of(space), sample) is sample
    assert spec_of(space).observed_shape == (4, 6, 3)


@every_space
def test_actions_are_in_the_space(space: gymnasium.Space[Any]) -> None:
    spec, draw = spec_of(space), np.random.default_rng(0)
    columns = np.stack([_columns(spec, draw) for _ in range(6)])
    decode = ActionDecoder(spec)
    actions = [decode(row) for row in columns]
    assert all(space.contains(action) for action in actions)
    together = decode(columns)
    assert batch_space(space, 6).contains(together)
    expected = batched(space, actions)
    assert str(together) == str(expected) if spec.parts else np.array_equal(together, expected)


def _columns(spec: SpaceSpec, draw: np.random.Generator) -> NDArray[Any]:
    """What a distribution could draw: discrete ones from 0, boxes far beyond their bounds."""
    if spec.parts:
        return np.concatenate([_columns(part, draw) for part in spec.parts])
    if spec.kind == "box":
        return (draw.normal(size=spec.size) * 10).astype(np.float32)
    if spec.kind == "multi_binary":
        return draw.integers(0, 2, spec.size).astype(np.float32)
    return draw.integers(0, spec.nvec).astype(np.float32)


def test_a_box_is_clipped_and_a_discrete_action_starts_where_its_space_does() -> None:
    decode = ActionDecoder(spec_of(SPACES["bounds by element"]))
    assert decode(np.array([5.0, 5.0], np.float32)).tolist() == [2.0, 0.5]
    assert decode(np.array([-5.0, -5.0], np.float32)).tolist() == [-1.0, -5.0]
    assert ActionDecoder(spec_of(spaces.Discrete(5, start=2)))(np.array([4.0], np.float32)) == 6


@every_space
def test_a_spec_travels(space: gymnasium.Space[Any]) -> None:
    spec = spec_of(space)
    assert msgspec.json.decode(msgspec.json.encode(spec), type=SpaceSpec) == spec


@pytest.mark.parametrize("space", [spaces.Text(5), spaces.Sequence(spaces.Discrete(2))], ids=["text", "sequence"])
def test_spaces_without_a_size_are_refused(space: gymnasium.Space[Any]) -> None:
    with pytest.raises(Invalid, match="no fixed number of elements"):
        spec_of(spaces.Dict({"inner": space}))
