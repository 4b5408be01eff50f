"""Where PPO's environments live: on the server by registered id, or here, as a class of the user's own.

Both do the same with the same functions (``compute.engine.control``); a trainer can't tell them apart.
"""

from __future__ import annotations

import functools
import importlib.util
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from gradserve.algorithms.weights import digest_of, packed, unpacked
from gradserve.client.modules import ModuleClient
from gradserve.wire.control import EnvSpec, EpisodeStats, PPOConfig, RolloutSpec, SpaceSpec, validate_env
from gradserve.wire.graph import Graph

Answer = Callable[[], dict[str, Any]]
"""Waits for a request; what it answered."""


class Environments(Protocol):
    """Environments of one kind. ``observations`` and ``actions`` are the spaces of one."""

    env: EnvSpec
    observations: SpaceSpec
    actions: SpaceSpec
    sent_ahead: bool
    """Whether an epoch may be asked for before the last one is done."""

    def act_by(self, policy: Graph) -> None:
        """The run's graph; before the first rollout."""

    def rollout(self, run: ModuleClient, spec: RolloutSpec) -> Answer:
        """The run's policy acts; what it did waits for an update. The answer has ``episodes``: see EpisodeStats."""

    def update(self, run: ModuleClient, config: PPOConfig, seed: int) -> Answer:
        """PPO on what waits. The answer has ``metrics``."""

    def evaluate(self, run: ModuleClient, spec: RolloutSpec, episodes: int, seed: int, deterministic: bool) -> Answer:
        """Whole episodes of the policy as it is, with the seed ``seed``; the answer has ``episodes``."""

    def state(self) -> bytes:
        """What must be kept beside the run to go on with the same episodes."""

    def restore(self, state: bytes) -> None:
        """The inverse."""


class ServerEnvironments:
    """By a registered id, on the server's workers; their state is the run's own."""

    sent_ahead = True

    def __init__(self, env: EnvSpec) -> None:
        _need_gymnasium()
        from gradserve.compute.engine.control.environments import spaces_of

        validate_env(env)
        self.env = env
        self.observations, self.actions = spaces_of(env)

    def act_by(self, policy: Graph) -> None:
        """Nothing to do: the server has it."""

    def rollout(self, run: ModuleClient, spec: RolloutSpec) -> Answer:
        """See Environments."""
        return run.rollout(spec).result

    def update(self, run: ModuleClient, config: PPOConfig, seed: int) -> Answer:
        """See Environments."""
        return run.update(self.env, config, seed).result

    def evaluate(self, run: ModuleClient, spec: RolloutSpec, episodes: int, seed: int, deterministic: bool) -> Answer:
        """See Environments."""
        return run.evaluate(
            self.env,
            episodes,
            seed,
            deterministic=deterministic,
            normalise_observations=spec.normalise_observations,
            clip_observation=spec.clip_observation,
        ).result

    def state(self) -> bytes:
        """None: the server has it."""
        return b""

    def restore(self, state: bytes) -> None:
        """Nothing to do."""


class ClientEnvironments:
    """Made by ``make`` in this process; the weights come from the server, the trajectories go there.

    An environment must do the same after ``reset(seed=...)`` and the same actions: that is how a resumed training finds
    its episodes again.
    """

    sent_ahead = False

    def __init__(self, make: Callable[[], Any], name: str) -> None:
        _need_gymnasium()
        from gradserve.compute.engine.control.environments import LoopGroup
        from gradserve.compute.engine.control.live import LiveGroups

        self.env = EnvSpec(name)
        self._make_group = functools.partial(_group_of, make)
        self._live = LiveGroups(make=self._make_group)
        self._state: dict[str, Any] = {}
        trial = LoopGroup(self.env, 0, range(1), make)
        self.observations, self.actions = trial.observation_space, trial.action_space
        trial.close()

    def act_by(self, policy: Graph) -> None:
        """See Environments."""
        from gradserve.compute.engine.graph_store import BoundedGraph
        from gradserve.compute.engine.modules import policy_of

        self._policy = policy_of(BoundedGraph(policy))

    def rollout(self, run: ModuleClient, spec: RolloutSpec) -> Answer:
        """See Environments."""
        from gradserve.compute.engine.control.rollout import rollout
        from gradserve.compute.engine.modules import MODULE
        from gradserve.compute.engine.origin import Origin

        file = run.weights()
        weights, origin = unpacked(file), Origin(digest_of(file), MODULE).metadata()
        sent, found = [], []
        for group in range(spec.groups):
            trajectory, state, stats = rollout(self._policy, weights, spec, group, self._state, self._live)
            self._state |= state
            found.append(stats)
            sent.append(run.put_trajectory(packed(trajectory, origin)))
        episodes = _answered(found)
        return lambda: {"episodes": episodes, "sent": [future.result() for future in sent]}

    def update(self, run: ModuleClient, config: PPOConfig, seed: int) -> Answer:
        """See Environments."""
        return run.update(self.actions, config, seed).result

    def evaluate(self, run: ModuleClient, spec: RolloutSpec, episodes: int, seed: int, deterministic: bool) -> Answer:
        """See Environments."""
        from gradserve.compute.engine.control.evaluate import evaluate

        stats = evaluate(
            self._policy,
            unpacked(run.weights()),
            self.env,
            episodes,
            seed,
            deterministic,
            spec.normalise_observations,
            spec.clip_observation,
            self._make_group,
        )
        return lambda: {"episodes": _answered([stats])}

    def state(self) -> bytes:
        """Seeds' counters and actions since, compressed."""
        return zlib.compress(packed(self._state), 1) if self._state else b""

    def restore(self, state: bytes) -> None:
        """The inverse."""
        self._state = unpacked(zlib.decompress(state)) if state else {}


def _answered(stats: Sequence[EpisodeStats]) -> dict[str, Any]:
    """As the server answers."""
    return {
        "returns": [value for part in stats for value in part.returns],
        "lengths": [value for part in stats for value in part.lengths],
        "env_steps": sum(part.env_steps for part in stats),
    }


def environments_of(env_config: Mapping[str, Any] | None, env_fn: Callable[[], Any] | None) -> Environments:
    """``{"id": ..., "kwargs": ..., "max_episode_steps": ...}``, the same with ``class`` for ``id``, or a function.

    Raises TypeError for anything else.
    """
    config = dict(env_config or {})
    sources = [source for source in (config.pop("id", None), config.pop("class", None), env_fn) if source is not None]
    if len(sources) != 1:
        raise TypeError(
            "say which environment: env_config={'id': 'CartPole-v1'}, env_config={'class': MyEnv} or env_fn=make_env"
        )
    (source,) = sources
    kwargs, limit = config.pop("kwargs", {}), config.pop("max_episode_steps", None)
    if config:
        raise TypeError(f"env_config has no {next(iter(config))!r}; it has id or class, kwargs and max_episode_steps")
    if isinstance(source, str):
        return ServerEnvironments(EnvSpec(source, dict(kwargs), limit))
    return ClientEnvironments(_limited(functools.partial(source, **kwargs), limit), _name_of(source))


def _need_gymnasium() -> None:
    """An environment's spaces are read here, wherever it runs."""
    if importlib.util.find_spec("gymnasium") is None:
        raise ImportError("PPOTrainer reads an environment's spaces by gymnasium: pip install 'gradserve[control]'")


def _limited(make: Callable[[], Any], limit: int | None) -> Callable[[], Any]:
    if limit is None:
        return make
    from gymnasium.wrappers import TimeLimit

    return lambda: TimeLimit(make(), limit)


def _name_of(source: Callable[..., Any]) -> str:
    """A name for settings and messages, in the alphabet of ids."""
    name = getattr(source, "__name__", type(source).__name__)
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name).strip("-") or "env"


def _group_of(make: Callable[[], Any], env: EnvSpec, seed: int, members: range) -> Any:
    from gradserve.compute.engine.control.environments import LoopGroup

    return LoopGroup(env, seed, members, make)
