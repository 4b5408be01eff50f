"""Between Gymnasium's spaces and arrays: observations to rows for the policy, action columns to actions.

Both work on one sample and on a batch of a vector environment, whose axes come first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve.wire.control import SpaceSpec
from gradserve.wire.errors import Invalid

Floats = NDArray[np.float32]

_EXACT = 1 << 24
"""Actions travel as float32, which holds whole numbers up to here."""


def spec_of(space: Any) -> SpaceSpec:
    """The SpaceSpec of a gymnasium.Space. Raises Invalid for kinds that have no fixed size (Text, Sequence, Graph)."""
    from gymnasium import spaces

    match space:
        case spaces.Box():
            return SpaceSpec("box", space.shape, space.dtype.name, _bounds(space.low), _bounds(space.high))
        case spaces.Discrete():
            return SpaceSpec("discrete", (), "int64", nvec=(int(space.n),), start=(int(space.start),))
        case spaces.MultiDiscrete():
            nvec, start = space.nvec.ravel().tolist(), space.start.ravel().tolist()
            return SpaceSpec("multi_discrete", space.shape, space.dtype.name, nvec=tuple(nvec), start=tuple(start))
        case spaces.MultiBinary():
            return SpaceSpec("multi_binary", space.shape, "int8")
        case spaces.Dict():
            parts = tuple(spec_of(part) for part in space.spaces.values())
            return SpaceSpec("dict", parts=parts, keys=tuple(space.spaces.keys()))
        case spaces.Tuple():
            return SpaceSpec("tuple", parts=tuple(spec_of(part) for part in space.spaces))
    raise Invalid(
        "bad_control",
        f"a {type(space).__name__} space has no fixed number of elements.",
        field="env.id",
        fix="Use an environment of Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple spaces.",
    )


def _bounds(values: NDArray[Any]) -> tuple[float | None, ...]:
    flat = values.astype(np.float64).ravel()
    if flat.size and (flat == flat[0]).all():
        flat = flat[:1]
    return tuple(float(value) if np.isfinite(value) else None for value in flat)


def encode(spec: SpaceSpec, observation: Any, lead: int = 0) -> NDArray[Any]:
    """Float32 [..., features] as ``gymnasium.spaces.flatten`` orders them; images stay uint8 as they are.

    ``lead`` counts the batch axes of ``observation``.
    """
    if spec.is_image:
        return np.asarray(observation)
    if spec.parts:
        keys: Any = spec.keys if spec.kind == "dict" else range(len(spec.parts))
        rows = [encode(part, observation[key], lead) for part, key in zip(spec.parts, keys, strict=True)]
        return np.concatenate([row.reshape(*row.shape[:lead], -1).astype(np.float32) for row in rows], axis=-1)
    values = np.asarray(observation)
    flat = values.reshape(*values.shape[:lead], -1)
    return _one_hot(spec, flat) if spec.nvec else flat.astype(np.float32)


def _one_hot(spec: SpaceSpec, values: NDArray[Any]) -> Floats:
    """[..., n] whole numbers -> [..., sum(nvec)]."""
    parts = [
        (values[..., i, None] - start == np.arange(size)).astype(np.float32)
        for i, (size, start) in enumerate(zip(spec.nvec, spec.start * (len(spec.nvec) // len(spec.start)), strict=True))
    ]
    return np.concatenate(parts, axis=-1)


class ActionDecoder:
    """Columns float32 [..., size] -> what an environment's step takes.

    Discrete columns count from 0. A Box is clipped to its bounds here and nowhere else: the policy's log-probability is
    that of the action it drew (detail 29 of Huang et al. 2022; Stable-Baselines3 does the same).
    """

    def __init__(self, spec: SpaceSpec) -> None:
        self._spec = spec
        self._parts = [ActionDecoder(part) for part in spec.parts]
        self._dtype = np.dtype(spec.dtype)
        if max(spec.nvec, default=0) > _EXACT:
            raise Invalid("bad_control", f"a discrete action of more than {_EXACT} values.", field="env.id")
        if spec.kind == "box":
            self._low = np.array([-np.inf if low is None else low for low in spec.low])
            self._high = np.array([np.inf if high is None else high for high in spec.high])
        elif spec.nvec:
            self._start = np.array(spec.start, dtype=self._dtype)

    def __call__(self, columns: Floats) -> Any:
        """The action, or the batch of them that a vector environment takes."""
        spec, lead = self._spec, columns.shape[:-1]
        match spec.kind:
            case "dict":
                return dict(zip(spec.keys, self._split(columns), strict=True))
            case "tuple":
                return tuple(self._split(columns))
            case "discrete":
                return (columns[..., 0].astype(self._dtype) + self._start[0]).astype(self._dtype)
            case "multi_discrete":
                return (columns.astype(self._dtype) + self._start).reshape((*lead, *spec.shape))
            case "multi_binary":
                return columns.astype(self._dtype).reshape((*lead, *spec.shape))
        values = np.clip(columns.astype(np.float64), self._low, self._high)
        if self._dtype.kind != "f":
            values = np.rint(values)
        return values.astype(self._dtype).reshape((*lead, *spec.shape))

    def _split(self, columns: Floats) -> list[Any]:
        ends = np.cumsum([part.size for part in self._spec.parts])[:-1]
        return [part(piece) for part, piece in zip(self._parts, np.split(columns, ends, axis=-1), strict=True)]
