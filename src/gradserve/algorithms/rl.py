"""Reinforcement learning of language models with a reward: groups of answers to a prompt, compared with each other.

with RLTrainer("smollm2-135m-instruct", reward_func=right, group_size=8) as trainer:
    trainer.fit("questions.jsonl", eval_data="held-out.jsonl", batch_size=8)
    trainer.model  # a sampling client
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import tinker
from tinker import types

from gradserve.algorithms import critic
from gradserve.algorithms.collect import Collector, Group, Policy, Sampling
from gradserve.algorithms.critic import CriticConfig
from gradserve.algorithms.datums import datum, grad_norm, scored
from gradserve.algorithms.policy_batch import Floats, PolicyBatch, episode_mask
from gradserve.algorithms.rl_variants import VARIANTS
from gradserve.algorithms.rollouts.advantages import is_informative, soft_overlong_penalty
from gradserve.algorithms.rollouts.corrections import CORRECTIONS
from gradserve.algorithms.rollouts.producer import RolloutProducer
from gradserve.algorithms.rollouts.store import RolloutStore
from gradserve.algorithms.schedules import Schedule
from gradserve.algorithms.trainer import Trainer
from gradserve.algorithms.training_loop import Answer, Batch, Metrics
from gradserve.client.full import create_lora_training_client
from gradserve.data.dataset import Dataset
from gradserve.episodes.chat import ChatTemplate
from gradserve.episodes.environment import SingleTurn, environment_of
from gradserve.episodes.episode import Episode
from gradserve.episodes.plain import PlainText
from gradserve.rewards.contract import Reward
from gradserve.rewards.runner import RewardRunner
from gradserve.tracking import rl_metrics
from gradserve.tracking.statistics import estimate

_EVALUATION_SEED = 7_777_777
_BATCHES_APART, _SEEDS_APART = 15_485_863, 86_028_121
"""Between the sampling seeds of batches, and of trainers with neighbouring seeds."""
_MOST_ROUNDS = 10
"""Batches that dynamic sampling looks through for one step."""
_BUFFER = 5
"""Parts of the token limit, of which the last is DAPO's buffer: 4,096 of 20,480 tokens in the paper."""
_SHOWN = 4
"""Answers of an evaluation that are logged."""


class RLTrainer(Trainer):
    """Group-relative policy optimisation by name: see rl_variants for grpo, dr_grpo, gspo, cispo, dapo, reinforce.

    ``reward_func`` is a function of (prompt, completion, answer, state), its name ``"file.py:function"``, or None where
    the environment gives the rewards. It runs in processes of its own, each call for at most ``reward_timeout_s``; a
    sample whose reward fails is tried again, then left out and counted, never trained on as 0.

    ``env_config``: None for one reply to each row's ``prompt``, sent as a user's message; ``{"chat": False}`` for plain
    text; ``{"system_prompt": ...}``; ``{"environment": "file.py:Class", "max_turns": 4}`` for episodes of several
    turns, see docs/guides/episodes.md.

    A step takes ``batch_size`` rows, ``group_size`` answers each. ``kl_coef`` subtracts kl_coef·(log p - log p_ref)
    from the advantage of each token; the reference is the base model. ``max_off_policy_steps`` above 0 samples the next
    batches while this one is trained, from weights at most so many steps old; ``importance_correction`` (none,
    truncated, sequence, ...) then weighs tokens by how likely the trainer's weights would have sampled them.
    """

    kind: ClassVar[str] = "rl"
    shown: ClassVar[Mapping[str, str]] = {
        "reward/mean": "reward", "optim/grad_norm": "grad", "episode/tokens_mean": "length"
    }  # fmt: skip

    def __init__(
        self,
        model: str,
        reward_func: Reward | str | None = None,
        env_config: Mapping[str, Any] | None = None,
        *,
        algorithm: str = "grpo",
        group_size: int = 8,
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        rank: int = 32,
        learning_rate: Schedule = 1e-4,
        loss_config: Mapping[str, float] | None = None,
        kl_coef: float = 0.0,
        max_off_policy_steps: int = 0,
        importance_correction: str = "none",
        importance_cap: float = 2.0,
        reward_timeout_s: float = 5.0,
        reward_workers: int = 2,
        reward_retries: int = 1,
        eval_samples: int = 1,
        eval_temperature: float | None = None,
        **settings: Any,
    ) -> None:
        """``settings`` are Trainer's. ``eval_temperature`` None: the training's. Raises ValueError, RewardUnusable."""
        super().__init__(model, rank=rank, learning_rate=learning_rate, **settings)
        if algorithm not in VARIANTS:
            raise ValueError(f"algorithm is {algorithm!r}: give one of {', '.join(VARIANTS)}")
        if group_size < (1 if VARIANTS[algorithm].critic else 2):
            raise ValueError(f"group_size is {group_size}: an answer is compared with the others, give at least 2")
        if importance_correction not in CORRECTIONS:
            raise ValueError(
                f"importance_correction is {importance_correction!r}: give one of {', '.join(CORRECTIONS)}"
            )
        if max_off_policy_steps < 0 or eval_samples < 1 or max_tokens < 1:
            raise ValueError("max_off_policy_steps is at least 0, eval_samples and max_tokens at least 1")
        self.algorithm, self.variant = algorithm, VARIANTS[algorithm]
        self._loss_config = {**self.variant.config, **(loss_config or {})}
        self._critic = CriticConfig.of(self._loss_config) if self.variant.critic else None
        self.group_size = group_size
        self.sampling = Sampling(max_tokens, temperature, top_p, top_k)
        self.eval_samples = eval_samples
        self._eval_sampling = Sampling(max_tokens, temperature if eval_temperature is None else eval_temperature)
        self.kl_coef, self.staleness = kl_coef, max_off_policy_steps
        if self._critic is not None and importance_correction != "none":
            raise ValueError("importance_correction is for the group-relative algorithms, not for ppo")
        self._correction, self._cap = importance_correction, importance_cap
        config = dict(env_config or {})
        self._chat, self._system_prompt = bool(config.pop("chat", True)), config.pop("system_prompt", None)
        self._environment = environment_of(config)
        if self._system_prompt and "environment" in config:
            raise ValueError("system_prompt is for single-turn rows; an environment's start gives its own messages")
        if reward_func is None and self._environment.make is SingleTurn:
            raise ValueError("there is no reward: give reward_func, or an env_config with an environment that rewards")
        self._rewards = (
            None if reward_func is None else RewardRunner(reward_func, reward_timeout_s, reward_workers, reward_retries)
        )
        self._samplers: dict[int, Any] = {}
        self._reference: tinker.SamplingClient | None = None
        self._asked = self._handed = 0
        self.evaluated: list[Group] = []
        """The episodes of the latest evaluation, a group for each row."""

    def close(self) -> None:
        """Also ends the reward's processes."""
        if self._rewards is not None:
            self._rewards.close()
        super().close()

    # What Trainer asks

    def _begin(self) -> None:
        tokenizer = self.tokenizer
        template = ChatTemplate(tokenizer) if self._chat else PlainText(tokenizer)
        self._collector = Collector(template, self._environment, self._rewards, self._system_prompt)
        self._asked = self.step
        self._samplers = {self.step: self.run.save_weights_and_get_sampling_client()}
        if self.kl_coef:
            self._reference = self.service.create_sampling_client(base_model=self.base_model).result()
        self.rollouts = RolloutStore(self.log_dir / "rollouts.sqlite", tokenizer.decode)
        self.rollouts.cut(self.step)

    def _end(self) -> None:
        self.rollouts.close()

    def _state(self) -> dict[str, Any]:
        return {"batches": self._handed}

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._handed = int(state["batches"])

    def _batches(self, dataset: Dataset, batch_size: int, epochs: int) -> Generator[Batch]:
        """Groups instead of rows."""
        rows = super()._batches(dataset, batch_size, epochs)
        with RolloutProducer(
            rows, self._collect, lambda: self._asked, max_off_policy_steps=self.staleness, first=self._handed
        ) as producer:
            if self.variant.dynamic_sampling:
                yield from self._with_something_to_teach(producer, batch_size)
            else:
                for batch in producer:
                    self._handed += 1
                    yield batch

    def _with_something_to_teach(self, collected: Iterable[Batch], batch_size: int) -> Generator[Batch]:
        """Batches of ``batch_size`` groups whose rewards differ, from up to 10 times as many rows."""
        kept: list[Group] = []
        last: Batch | None = None
        rounds = held = 0
        for batch in collected:
            if last is not None and kept and batch.epoch > last.epoch:
                self._handed, held = self._handed + held, 0
                yield replace(last, items=kept)
                kept, rounds = [], 0
            kept += [group for group in batch.items if is_informative(group)]
            last, rounds, held = batch, rounds + 1, held + 1
            if len(kept) >= batch_size or rounds == _MOST_ROUNDS:
                self._handed, held = self._handed + held, 0
                yield replace(batch, items=kept or batch.items)
                kept, rounds = [], 0
        if last is not None and kept:
            self._handed += held
            yield replace(last, items=kept)

    def _collect(self, rows: Sequence[Mapping[str, Any]], version: int, seed: int) -> list[Group]:
        policy = Policy(self._samplers[version].result(), self.sampling, version)
        seed = (self.seed * _SEEDS_APART + seed) * _BATCHES_APART
        groups = self._collector.groups(policy, rows, self.group_size, seed)
        if not self.variant.overlong_penalty:
            return groups
        buffer = max(1, self._most_tokens // _BUFFER)
        return [[soft_overlong_penalty(each, self._most_tokens, buffer) for each in group] for group in groups]

    @property
    def _most_tokens(self) -> int:
        """What an episode may sample."""
        return self.sampling.max_tokens * self._environment.max_turns

    def _ask(self, items: Sequence[Any], learning_rate: float) -> Answer:
        groups: list[Group] = list(items)
        metrics = rl_metrics.of_groups(groups, version=self._asked)
        update = self._with_critic if self._critic is not None else self._with_groups
        answer = update(groups, learning_rate)
        self._asked += 1
        self._samplers[self._asked] = self.run.save_weights_and_get_sampling_client()
        self._samplers.pop(self._asked - self.staleness - 2, None)
        self.rollouts.append(self._asked, groups)
        if answer is None:  # nothing in it teaches anything
            return lambda: metrics | {"loss": 0.0, "optim/grad_norm": 0.0}
        return lambda: metrics | answer()

    def _with_groups(self, groups: Sequence[Group], learning_rate: float) -> Answer | None:
        """Answers against the others of their group."""
        batch = PolicyBatch.of(groups, self.variant, self._most_tokens)
        if not batch.episodes:
            return None
        metrics = self._corrected(batch)
        penalties, apart = self._from_reference(batch.episodes)
        batch.advantages = [value - less for value, less in zip(batch.advantages, penalties, strict=True)]
        loss: Any = self.variant.loss
        gradient = self.run.forward_backward(batch.data(), loss, self._loss_config or None)
        stepped = self.run.optim_step(self._step_params(learning_rate))

        def answer() -> Metrics:
            result = gradient.result()
            now = [scored(output) for output in result.loss_fn_outputs]
            loss = {"loss": result.metrics["loss:sum"], "optim/grad_norm": grad_norm(stepped)}
            return metrics | apart | self._moved(batch, now) | loss

        return answer

    def _with_critic(self, groups: Sequence[Group], learning_rate: float) -> Answer | None:
        """Tokens against what the value head expected."""
        assert self._critic is not None
        episodes = critic.trained_on(groups)
        if not episodes:
            return None
        penalties, apart = self._from_reference(episodes)
        loss: Any = critic.loss_of(self._critic)
        gradient = self.run.forward_backward(critic.data_of(episodes, penalties), loss)
        stepped = self.run.optim_step(self._step_params(learning_rate))
        return lambda: apart | critic.metrics_of(gradient.result().metrics) | {"optim/grad_norm": grad_norm(stepped)}

    def _moved(self, batch: PolicyBatch, now: Sequence[Floats]) -> Metrics:
        """How far the trainer's log-probs ``now`` are from those that were sampled by."""
        masks = batch.shifted([episode_mask(each) for each in batch.episodes])
        sampled = batch.shifted([np.array(each.logprobs) for each in batch.episodes])
        gains = batch.shifted(batch.advantages)
        anchors = batch.shifted(batch.anchors)
        return rl_metrics.of_ratios(
            now, anchors, self._loss_config, advantages=gains, mask=masks
        ) | rl_metrics.of_mismatch(now, sampled, masks)

    def _corrected(self, batch: PolicyBatch) -> Metrics:
        """Weigh stale tokens, by one more forward pass of the weights that are trained."""
        if self._correction == "none":
            return {}
        passed = self.run.forward([datum(each.tokens) for each in batch.episodes], "cross_entropy").result()
        now = [np.concatenate([[0.0], scored(output)]) for output in passed.loss_fn_outputs]
        return batch.corrected(now, self._correction, self._cap)

    def _from_reference(self, episodes: Sequence[Episode]) -> tuple[list[Floats], Metrics]:
        """kl_coef·(log p - log p_ref) [N] of each sampled token, the k1 estimate as a reward; and metrics."""
        if self._reference is None:
            return [np.zeros(len(each.tokens)) for each in episodes], {}
        asked = [self._reference.compute_logprobs(types.ModelInput.from_ints(list(each.tokens))) for each in episodes]
        references = [np.array([0.0, *future.result()[1:]]) for future in asked]
        policy = [np.array(each.logprobs) for each in episodes]
        masks = [episode_mask(each) for each in episodes]
        penalties = [
            self.kl_coef * (own - reference) * mask
            for own, reference, mask in zip(policy, references, masks, strict=True)
        ]
        return penalties, rl_metrics.of_kl(policy, references, masks)

    def _new_run(self) -> tinker.TrainingClient:
        if self._critic is None:
            return super()._new_run()
        made: tinker.TrainingClient = create_lora_training_client(
            self.service,
            self.base_model,
            self.rank,
            self.seed,
            train_mlp=self._targets["train_mlp"],
            train_attn=self._targets["train_attn"],
            train_unembed=self._targets["train_unembed"],
            value_head=True,
        ).result()
        return made

    def _evaluate(self, rows: Sequence[Mapping[str, Any]]) -> Metrics:
        """``eval_samples`` episodes of each row, always with the same random numbers."""
        policy = Policy(self._samplers[self.step].result(), self._eval_sampling, self.step)
        groups = self.evaluated = self._collector.groups(policy, rows, self.eval_samples, _EVALUATION_SEED)
        found = [(number, each) for number, group in enumerate(groups) for each in group if each.failure is None]
        if not found:
            raise ValueError(f"no episode of the evaluation has a reward; the first failed: {groups[0][0].failure}")
        rewards = [each.reward or 0.0 for _, each in found]
        self._show_samples([each for _, each in found])
        return {
            **estimate(rewards, problems=[number for number, _ in found]).metrics("eval/reward"),
            "eval/failed": sum(map(len, groups)) - len(found),
        }

    def _show_samples(self, episodes: Sequence[Episode]) -> None:
        """The worst and the best answers, for people: a number can't tell learning from cheating."""
        ordered = sorted(episodes, key=lambda each: each.reward or 0.0)
        shown = ordered if len(ordered) <= _SHOWN else [*ordered[: _SHOWN // 2], *ordered[-_SHOWN // 2 :]]
        lines = [f"- **{each.reward:.3g}** {each.messages[-1].get('content') or ''!r}" for each in shown]
        if self.tracker is not None:
            self.tracker.text(self.step, "eval/samples", "\n".join(lines))
