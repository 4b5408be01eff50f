"""Control policies by PPO: a module and an environment in, a trained module out.

    trainer = PPOTrainer(policy_net=module, env_config={"id": "CartPole-v1"}, rollout_batch_size=1024)
    trainer.train(max_epochs=60)
    trainer.policy  # the module, trained

Rollouts and updates run on the server (compute/engine/control), where every Op is journalled; this file decides what to
ask for, and sends the next epoch's requests before the last one's answers are there.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec

from gradserve.algorithms.environments import Answer, environments_of
from gradserve.algorithms.ppo_settings import KINDS, PPOSettings, refuse_unknown, settings_of
from gradserve.algorithms.progress import progress_line
from gradserve.algorithms.refusals import as_value_errors
from gradserve.algorithms.weights import packed, trained, unpacked
from gradserve.client.connect import connect
from gradserve.client.modules import ModuleClient
from gradserve.client.state import put_state, state_of
from gradserve.wire import graph as ir
from gradserve.wire.control import validate_ppo, validate_rollout
from gradserve.wire.control_defaults import defaults_for

if TYPE_CHECKING:
    import tinker
    from torch import nn

    from gradserve.wire.control import RolloutSpec
    from gradserve.wire.graph import Graph

_AHEAD = 2
"""Epochs that are asked for before the oldest one's answer is there."""
_WINDOW = 100
"""Episodes that ``episode_return`` is the mean of."""
_APART = 1_000_000
"""Between seeds: of the updates of trainers with neighbouring ones, and of an evaluation and its training."""
_MAX_STATE = 1 << 20
"""Bytes of a client's own state that the server keeps."""
_SHOWN = {"episode_return": "return", "env_steps": "steps", "approx_kl": "kl", "explained_variance": "ev"}

Metrics = dict[str, float]
Callback = Callable[[Metrics], Any]


class _Position(msgspec.Struct):
    """Where a training stands: what a checkpoint keeps beside the run's own arrays.

    ``recent`` are (return, length) of the last episodes; ``environments`` is the state of those that live here.
    """

    settings: PPOSettings
    epoch: int = 0
    env_steps: int = 0
    recent: list[tuple[float, int]] = []
    environments: bytes = b""


class PPOTrainer:
    """Proximal Policy Optimization of a policy in vectorised Gymnasium environments.

    ``policy_net`` is a torch module (None: a perceptron): see ActorCritic for what it may take and give. A critic and
    deviations are added where it has none; the module itself stays as it is. ``env_config`` is {"id": "CartPole-v1",
    "kwargs": {...}, "max_episode_steps": n}, of which all but the id may be missing. With {"class": MyEnv} for the id,
    or with ``env_fn`` (a function that makes one environment), rollouts run in this process.

    ``rollout_batch_size`` is the number of transitions per epoch: ``num_envs`` times the steps of each; None: the
    environment's default. ``settings`` are those of PPOConfig and RolloutSpec; the defaults are rl-zoo3's for the
    environment. ``learning_rate`` and ``clip_range`` may be a number, ``"linear_1e-3"`` or a function of the fraction
    of all epochs that is done.

    ``service`` is what ``gradserve.connect()`` gives; None: GRADSERVE_URL, or a server started for this trainer, which
    ends with ``close`` or the ``with`` block. ``resume`` is the path that ``save`` returned, of a trainer with the same
    module and environment; settings that are not given again are those it had.

    ``history`` has one dict per epoch that this trainer made: see ``train``.

    Raises TypeError for an unknown setting, ValueError for one out of bounds, for an environment that is not registered
    and for a module that does not fit its spaces, CaptureError for a module that can't become a graph.
    """

    settings_kinds: ClassVar[Mapping[str, Any]] = KINDS
    """What ``settings`` may name, with types."""

    def __init__(
        self,
        policy_net: nn.Module | None = None,
        env_config: Mapping[str, Any] | None = None,
        rollout_batch_size: int | None = None,
        *,
        env_fn: Callable[[], Any] | None = None,
        service: tinker.ServiceClient | None = None,
        resume: str | None = None,
        **settings: Any,
    ) -> None:
        from gradserve.algorithms.actor_critic import ActorCritic, example
        from gradserve.compiler.modules import capture_module

        refuse_unknown(settings)
        self.history: list[Metrics] = []
        self._pending: deque[_Epoch] = deque()
        with as_value_errors():
            self._envs = environments_of(env_config, env_fn)
        defaults = defaults_for(self._envs.env.id)
        self._module = ActorCritic(
            policy_net, self._envs.observations, self._envs.actions, defaults, settings.get("seed", 0)
        )
        if resume is None:
            self._position = _Position(settings_of(defaults, rollout_batch_size, settings))
            self._check()
        graph, tensors = capture_module(self._module, example(self._envs.observations))
        self._envs.act_by(graph)
        self._service = service or connect(models={})
        self._owns_service = service is None
        try:
            if resume is None:
                self._run = ModuleClient.create(self._service, ir.encode(graph).decode(), packed(tensors))
            else:
                self._run = ModuleClient.load(self._service, resume)
                self._position = self._stored(graph, rollout_batch_size, settings)
                self._check()
        except BaseException:
            self.close()
            raise

    def train(
        self,
        max_epochs: int = 100,
        callback: Callable[[Metrics], Any] | None = None,
        *,
        checkpoint_every: int | None = None,
    ) -> list[Metrics]:
        """Go on until ``max_epochs`` epochs of a rollout and an update have been made in all; returns ``history``.

        An epoch's dict has ``epoch`` (from 1), ``env_steps`` (in all), ``episodes`` (that ended in it),
        ``episode_return`` and ``episode_length`` (means over the last 100 episodes; missing before the first ends), and
        the update's metrics: policy_loss, value_loss, entropy, approx_kl, clip_fraction, explained_variance, grad_norm,
        learning_rate and others.

        ``callback`` gets each dict; what it returns, if true, ends the training. It may call ``evaluate``, ``save`` and
        ``policy``: with a callback no epoch is sent ahead. ``checkpoint_every`` saves as ``epoch-<n>`` every so many
        epochs, over what is there.

        Raises RequestFailed, ExtensionError.
        """
        ahead = _AHEAD if self._envs.sent_ahead and callback is None else 1
        with progress_line("ppo", max_epochs, self._position.epoch, _SHOWN) as show:
            while self._pending or self._position.epoch < max_epochs:
                while len(self._pending) < ahead and self._asked < self._next_stop(max_epochs, checkpoint_every):
                    self._pending.append(self._ask(max_epochs))
                metrics = self._settle()
                show(metrics)
                if checkpoint_every and self._position.epoch % checkpoint_every == 0:
                    self.save(f"epoch-{self._position.epoch}", overwrite=True)
                if callback is not None and callback(metrics):
                    break
        return self.history

    @property
    def policy(self) -> nn.Module:
        """A copy of ``policy_net`` with the trained weights, for raw observations as ActorCritic describes them.

        It gives what the module gives: logits, means, or a tuple or dict. Where observations were normalised it is a
        NormalisedPolicy around the module.
        """
        from gradserve.algorithms.actor_critic import policy_of

        self._settle_all()
        return policy_of(self._module, unpacked(self._run.weights()), self._spec.clip_observation)

    @property
    def actor_critic(self) -> nn.Module:
        """A copy of all that is trained, with critic and deviations, for observations as training sees them."""
        self._settle_all()
        return trained(self._module, unpacked(self._run.weights()))

    @property
    def run_id(self) -> str:
        """The name of the run on the server."""
        return self._run.run_id

    def evaluate(self, episodes: int = 20, seed: int | None = None, *, deterministic: bool = True) -> dict[str, Any]:
        """Whole episodes of the policy as it is, by the likeliest actions or by drawn ones.

        ``returns`` and ``lengths`` of each, their means ``episode_return`` and ``episode_length``, and ``env_steps``.
        The same ``seed`` gives the same episodes; None: those of this trainer's seed, which training never has.
        """
        self._settle_all()
        seed = self._position.settings.seed + _APART if seed is None else seed
        found: dict[str, Any] = self._envs.evaluate(self._run, self._spec, episodes, seed, deterministic)()["episodes"]
        means = {f"episode_{name}": statistics.fmean(found[f"{name}s"]) for name in ("return", "length")}
        return found | means

    def save(self, name: str, *, overwrite: bool = False) -> str:
        """Name the state of training as it is; returns the path that ``resume`` takes."""
        self._settle_all()
        self._position.environments = self._envs.state()
        state = _written(self._position)
        if len(state) > _MAX_STATE:
            raise ValueError(
                f"the environments' state takes {len(state)} bytes and a checkpoint keeps {_MAX_STATE}: it grows with "
                "num_envs and with the actions since the episodes began; lower anchor_steps"
            )
        put_state(self._service.holder, self._run.run_id, state)
        path: str = self._run.save(name, overwrite=overwrite).result()["path"]
        return path

    def close(self) -> None:
        """End the server that was started for this trainer; one that was given stays as it is."""
        if self._owns_service:
            self._owns_service = False
            self._service.close("success")

    def __enter__(self) -> PPOTrainer:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _check(self) -> None:
        """Raises ValueError for settings that the server would refuse."""
        with as_value_errors():
            validate_rollout(self._spec)
            validate_ppo(self._position.settings.update(0.0))

    @property
    def _spec(self) -> RolloutSpec:
        return self._position.settings.rollout(self._envs.env)

    @property
    def _asked(self) -> int:
        """Epochs that were asked for so far."""
        return self._position.epoch + len(self._pending)

    def _next_stop(self, max_epochs: int, checkpoint_every: int | None) -> int:
        """The epoch beyond which nothing may be asked for yet: a checkpoint must find the run where it stands."""
        if not checkpoint_every:
            return max_epochs
        return min(max_epochs, (self._position.epoch // checkpoint_every + 1) * checkpoint_every)

    def _ask(self, max_epochs: int) -> _Epoch:
        """Request one epoch."""
        epoch, settings = self._asked, self._position.settings
        config = settings.update(epoch / max_epochs)
        rollout = self._envs.rollout(self._run, self._spec)
        return _Epoch(rollout, self._envs.update(self._run, config, settings.seed * _APART + epoch))

    def _settle(self) -> Metrics:
        """Wait for the oldest epoch that was asked for."""
        asked, position = self._pending[0], self._position
        episodes, update = asked.rollout()["episodes"], asked.update()["metrics"]
        self._pending.popleft()
        position.epoch += 1
        position.env_steps += episodes["env_steps"]
        ended = list(zip(episodes["returns"], episodes["lengths"], strict=True))
        position.recent = [*position.recent, *ended][-_WINDOW:]
        metrics: Metrics = {"epoch": position.epoch, "env_steps": position.env_steps, "episodes": len(ended)}
        if position.recent:
            returns, lengths = zip(*position.recent, strict=True)
            metrics |= {"episode_return": statistics.fmean(returns), "episode_length": statistics.fmean(lengths)}
        self.history.append(metrics | update)
        return self.history[-1]

    def _settle_all(self) -> None:
        while self._pending:
            self._settle()

    def _stored(self, graph: Graph, rollout_batch_size: int | None, given: Mapping[str, Any]) -> _Position:
        """The position of the checkpoint that the run began with, with what is given changed."""
        if self._run.graph != ir.digest(ir.encode(graph)):
            raise ValueError("the checkpoint is of another module, or of other spaces: resume with the same policy_net")
        state = state_of(self._service.holder, self._run.run_id)
        if not state:
            raise ValueError("the checkpoint was not saved by PPOTrainer")
        position = msgspec.msgpack.decode(state, type=_Position)
        position.settings = position.settings.changed(rollout_batch_size, given)
        self._envs.restore(position.environments)
        return position


class _Epoch(NamedTuple):
    """What was asked for."""

    rollout: Answer
    update: Answer


def _written(position: _Position) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(position, settings=position.settings.storable()))
