"""Groups of environments that step together, made by registered id, started from seeds and brought back by replay.

An environment object can't travel. What travels are its Anchors: which episode it is in and the actions since that
episode's reset. A group that has no live copy resets and plays them again. Environments that step one by one are a
stream of episodes each; those that a vector entry point steps as one object are one stream together.

Invariant: what a group does depends on (spec, seed, members, actions) alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from gradserve.compute.engine.control.noise import episode_seed
from gradserve.compute.engine.control.spaces import ActionDecoder, Floats, encode, spec_of
from gradserve.wire.control import EnvSpec, SpaceSpec, validate_env
from gradserve.wire.errors import Invalid

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


_REMADE = ("BipedalWalker", "CarRacing")
"""Environments whose reset leaves traces of the episode before: they keep their Box2D world, and the order of contacts
in it enters the last bits. Each of their episodes gets an object of its own (LunarLander makes a world itself)."""


class Step(NamedTuple):
    """What one step of n environments led to.

    ``final_observation`` [n, ...] is what the transition ended in, ``observation`` [n, ...] what to act on next: the
    same, but for an environment that was reset within the step. ``valid`` [n] is false where an environment of a
    vector entry point was being reset, took no action and gave no reward: not a transition.
    """

    observation: NDArray[Any]
    reward: NDArray[np.float64]
    terminated: Bools
    truncated: Bools
    final_observation: NDArray[Any]
    valid: Bools


@dataclass(frozen=True)
class Anchors:
    """The state of a group of environments, in ``streams`` streams.

    ``episodes`` [streams]: which reset of its stream each is in. ``lengths`` [streams]: steps since. ``actions``
    [sum(lengths), width]: those steps' action columns, stream after stream.
    """

    episodes: Ints
    lengths: Ints
    actions: Floats

    @classmethod
    def fresh(cls, streams: int, width: int) -> Anchors:
        """Before the first step."""
        return cls(np.zeros(streams, np.int64), np.zeros(streams, np.int64), np.zeros((0, width), np.float32))

    def by_stream(self) -> list[Floats]:
        """The actions [length, width] of each stream."""
        return np.split(self.actions, np.cumsum(self.lengths)[:-1])

    def restarted(self, which: Bools) -> Anchors:
        """Those streams in their next episode."""
        kept = [part[:0] if again else part for part, again in zip(self.by_stream(), which, strict=True)]
        return Anchors(self.episodes + which, np.where(which, 0, self.lengths), np.concatenate(kept))

    def after(self, taken: Floats, ended: Bools) -> Anchors:
        """After the steps ``taken`` [T, streams, width], where ``ended`` [T, streams] marks the last of an episode."""
        kept: list[Floats] = []
        for stream, before in enumerate(self.by_stream()):
            ends = np.flatnonzero(ended[:, stream])
            kept.append(taken[ends[-1] + 1 :, stream] if len(ends) else np.concatenate([before, taken[:, stream]]))
        lengths = np.array([len(part) for part in kept], np.int64)
        return Anchors(self.episodes + ended.sum(axis=0), lengths, np.concatenate(kept))


class Group(Protocol):
    """n environments that are stepped together.

    ``observation`` [n, ...] is what to act on now, as the policy sees it before normalisation. ``streams`` (n, or 1)
    and ``width`` are the shape of its Anchors.
    """

    observation_space: SpaceSpec
    action_space: SpaceSpec
    observation: NDArray[Any]
    streams: int
    width: int

    def restore(self, anchors: Anchors) -> None:
        """Reset to the anchors' episodes and play their actions again."""

    def step(self, columns: Floats) -> Step:
        """One step of all with action columns [n, A]; environments whose episode ended start the next one."""

    def restarts(self, ended: Bools) -> Bools:
        """[T, streams]: where a stream was reset with a new seed, given where episodes ended [T, n]."""

    def close(self) -> None:
        """Free what the environments hold."""


class MakeGroup(Protocol):
    """How the environments numbered ``members`` are made: ``make_group``, or what a user's own class takes."""

    def __call__(self, env: EnvSpec, seed: int, members: range, /) -> Group: ...


def spaces_of(env: EnvSpec) -> tuple[SpaceSpec, SpaceSpec]:
    """The observation and the action space of an environment, which is made and closed for it."""
    with _single(env) as made:
        return spec_of(made.observation_space), spec_of(made.action_space)


def make_group(env: EnvSpec, seed: int, members: range) -> Group:
    """The group of the environments numbered ``members``; call ``restore`` before the first step.

    Raises Invalid for an id that is not registered, settings the environment does not take, a space without a fixed
    size, and for a package that is missing (with the extra that has it).
    """
    vector = _vector_or_none(env, len(members))
    return VectorGroup(vector, seed, members) if vector is not None else LoopGroup(env, seed, members)


class LoopGroup:
    """Environments one by one; an episode that ends is followed by the next one's reset in the same step.

    ``make`` makes one that is not registered.
    """

    def __init__(self, env: EnvSpec, seed: int, members: range, make: Callable[[], Any] | None = None) -> None:
        self._make = make or functools.partial(_made, env)
        self._made = [self._make() for _ in members]
        self._env, self._seed, self._members = env, seed, members
        self.observation_space = spec_of(self._made[0].observation_space)
        self.action_space = spec_of(self._made[0].action_space)
        self._decode = ActionDecoder(self.action_space)
        self.streams, self.width = len(members), self.action_space.size
        self._episodes = np.zeros(self.streams, np.int64)
        dtype = np.uint8 if self.observation_space.is_image else np.float32
        self.observation = np.zeros((self.streams, *self.observation_space.observed_shape), dtype)

    def restore(self, anchors: Anchors) -> None:
        """See Group."""
        self._episodes = anchors.episodes.copy()
        for i, actions in enumerate(anchors.by_stream()):
            last = self._reset(i)
            for action in self._decode_all(actions):
                last = self._made[i].step(action)[0]
            self.observation[i] = encode(self.observation_space, last)

    def step(self, columns: Floats) -> Step:
        """See Group."""
        n = self.streams
        final = np.empty_like(self.observation)
        reward, terminated, truncated = np.zeros(n), np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        for i, action in enumerate(self._decode_all(columns)):
            seen, reward[i], terminated[i], truncated[i], _ = self._made[i].step(action)
            final[i] = encode(self.observation_space, seen)
        self.observation = final.copy()
        for i in np.flatnonzero(terminated | truncated).tolist():
            self._episodes[i] += 1
            self.observation[i] = encode(self.observation_space, self._reset(i))
        return Step(self.observation, reward, terminated, truncated, final, np.ones(n, np.bool_))

    def restarts(self, ended: Bools) -> Bools:
        """See Group."""
        return ended

    def close(self) -> None:
        """See Group."""
        for env in self._made:
            env.close()

    def _reset(self, i: int) -> Any:
        if self._env.id.startswith(_REMADE):
            self._made[i].close()
            self._made[i] = self._make()
        return self._made[i].reset(seed=episode_seed(self._seed, self._members[i], int(self._episodes[i])))[0]

    def _decode_all(self, columns: Floats) -> Iterator[Any]:
        """Actions of rows one by one; plain spaces are decoded at once."""
        if self.action_space.parts:
            return (self._decode(row) for row in columns)
        return iter(self._decode(columns))


class VectorGroup:
    """Environments that one object steps at once (a vector entry point that resets in the step after the last).

    Their resets draw from one generator, so they are one stream: its state is the seed and all actions since.
    """

    def __init__(self, made: Any, seed: int, members: range) -> None:
        self._made, self._seed, self._members = made, seed, members
        self.observation_space = spec_of(made.single_observation_space)
        self.action_space = spec_of(made.single_action_space)
        self._decode = ActionDecoder(self.action_space)
        self.streams, self.width = 1, len(members) * self.action_space.size
        self._ended = np.zeros(len(members), np.bool_)
        self.observation = np.zeros(0, np.float32)

    def restore(self, anchors: Anchors) -> None:
        """See Group."""
        seed = episode_seed(self._seed, self._members.start, int(anchors.episodes[0]))
        self._ended = np.zeros(len(self._members), np.bool_)
        self.observation = encode(self.observation_space, self._made.reset(seed=seed)[0], lead=1)
        for actions in anchors.actions.reshape(-1, len(self._members), self.action_space.size):
            self.step(actions)

    def step(self, columns: Floats) -> Step:
        """See Group."""
        seen, reward, terminated, truncated, _ = self._made.step(self._decode(columns))
        terminated, truncated = np.array(terminated, np.bool_), np.array(truncated, np.bool_)
        valid, self._ended = ~self._ended, terminated | truncated
        self.observation = encode(self.observation_space, seen, lead=1)
        return Step(self.observation, np.array(reward, np.float64), terminated, truncated, self.observation, valid)

    def restarts(self, ended: Bools) -> Bools:
        """See Group. Never: an episode's end draws from the one generator."""
        return np.zeros((len(ended), 1), np.bool_)

    def close(self) -> None:
        """See Group."""
        self._made.close()


def _vector_or_none(env: EnvSpec, count: int) -> Any:
    """The environment's own vector form, or None where it has none that resets in the step after an episode's last."""
    gymnasium = _gymnasium()
    registered = _registered(env)
    if registered.vector_entry_point is None or registered.additional_wrappers:
        return None
    limit = {} if env.max_episode_steps is None else {"max_episode_steps": env.max_episode_steps}
    with _explained(env):
        made = gymnasium.make_vec(env.id, count, vectorization_mode="vector_entry_point", **limit, **env.kwargs)
    if made.metadata.get("autoreset_mode") is not gymnasium.vector.AutoresetMode.NEXT_STEP:
        made.close()
        return None
    return made


@contextlib.contextmanager
def _single(env: EnvSpec) -> Iterator[Any]:
    made = _made(env)
    try:
        yield made
    finally:
        made.close()


def _made(env: EnvSpec) -> Any:
    _registered(env)
    limit = {} if env.max_episode_steps is None else {"max_episode_steps": env.max_episode_steps}
    with _explained(env):
        return _gymnasium().make(env.id, disable_env_checker=True, **limit, **env.kwargs)


def _registered(env: EnvSpec) -> Any:
    """Gymnasium's entry for the id. Checked here once more: nothing that names a module may reach ``make``."""
    validate_env(env)
    registry = _gymnasium().registry
    if env.id not in registry:
        fix = "Send an id that is registered on the worker, with its version: CartPole-v1."
        raise Invalid("unknown_environment", f"{env.id!r} is not registered.", field="env.id", fix=fix)
    return registry[env.id]


def _gymnasium() -> Any:
    try:
        import gymnasium
    except ImportError as error:
        fix = "Install it on the worker: pip install 'gradserve[control]'."
        raise Invalid("missing_extra", "gymnasium is not installed.", field="env.id", fix=fix) from error
    return gymnasium


@contextlib.contextmanager
def _explained(env: EnvSpec) -> Iterator[None]:
    """What goes wrong while an environment is made, in the user's terms: Gymnasium raises any kind of exception."""
    try:
        yield
    except (ImportError, _gymnasium().error.DependencyNotInstalled) as error:
        fix = "Install it on the worker: pip install 'gradserve[box2d]' or 'gradserve[mujoco]'."
        raise Invalid("missing_extra", f"{env.id}: {error}", field="env.id", fix=fix) from error
    except Exception as error:
        fix = "Send settings that the environment's documentation names."
        raise Invalid("bad_environment", f"{env.id}: {error}", field="env.kwargs", fix=fix) from error
