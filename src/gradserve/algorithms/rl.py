"""Reinforcement learning of language models with a reward: groups of answers to a prompt, compared with each other.

with RLTrainer("smollm2-135m-instruct", reward_func=right, group_size=8) as trainer:
    trainer.fit("questions.jsonl", eval_data="held-out.jsonl", batch_size=8)
    trainer.model  # a sampling client
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import tinker
from tinker import types

from gradserve.algorithms.collect import Collector, Group, Sampling
from gradserve.algorithms.datums import datum, scored
from gradserve.algorithms.rl_variants import VARIANTS, Variant
from gradserve.algorithms.rollouts.advantages import advantages, soft_overlong_penalty, token_weights
from gradserve.algorithms.rollouts.corrections import CORRECTIONS, importance_weights
from gradserve.algorithms.rollouts.producer import RolloutProducer
from gradserve.algorithms.rollouts.store import RolloutStore
from gradserve.algorithms.schedules import Schedule
from gradserve.algorithms.trainer import Answer, Batch, Metrics, Trainer
from gradserve.data.dataset import Dataset
from gradserve.episodes.chat import ChatTemplate
from gradserve.episodes.environment import environment_of
from gradserve.episodes.episode import Episode
from gradserve.rewards.contract import Reward
from gradserve.rewards.runner import RewardRunner
from gradserve.tracking import rl_metrics
from gradserve.tracking.statistics import Estimate

_EVALUATION_SEED = 7_777_777
_STEPS_APART = 15_485_863
"""Between the sampling seeds of steps."""


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
        if group_size < 2:
            raise ValueError(f"group_size is {group_size}: an answer is compared with the others, give at least 2")
        if importance_correction not in CORRECTIONS:
            raise ValueError(
                f"importance_correction is {importance_correction!r}: give one of {', '.join(CORRECTIONS)}"
            )
        if max_off_policy_steps < 0 or eval_samples < 1 or max_tokens < 1:
            raise ValueError("max_off_policy_steps is at least 0, eval_samples and max_tokens at least 1")
        self.algorithm, self.variant = algorithm, VARIANTS[algorithm]
        self._loss_config = {**self.variant.config, **(loss_config or {})}
        self.group_size = group_size
        self.sampling = Sampling(max_tokens, temperature, top_p, top_k)
        self.eval_samples = eval_samples
        self._eval_sampling = Sampling(max_tokens, temperature if eval_temperature is None else eval_temperature)
        self.kl_coef, self.staleness = kl_coef, max_off_policy_steps
        self._correction, self._cap = importance_correction, importance_cap
        self._chat, self._system_prompt, self._environment = _env_of(env_config)
        if reward_func is None and self._environment is None:
            raise ValueError(
                "there is nothing to learn from: give reward_func, or an env_config whose environment rewards"
            )
        self._rewards = (
            None if reward_func is None else RewardRunner(reward_func, reward_timeout_s, reward_workers, reward_retries)
        )
        self._samplers: dict[int, Any] = {}
        self._reference: tinker.SamplingClient | None = None

    def close(self) -> None:
        """Also ends the reward's processes."""
        if self._rewards is not None:
            self._rewards.close()
        super().close()

    # What Trainer asks

    def _begin(self) -> None:
        template = ChatTemplate(self.tokenizer) if self._chat else ChatTemplate.plain(self.tokenizer)
        self._collector = Collector(template, self._environment, self._rewards, self._chat, self._system_prompt)
        self._samplers = {self.step: self.run.save_weights_and_get_sampling_client()}
        self._asked_steps = self.step
        if self.kl_coef:
            self._reference = self.service.create_sampling_client(base_model=self.base_model)
        self.rollouts = RolloutStore(Path(self._log_dir or ".") / "rollouts.sqlite")
        self.rollouts.cut(self.step)

    def _end(self) -> None:
        self.rollouts.close()

    def _batches(self, dataset: Dataset, batch_size: int, epochs: int) -> Generator[Batch]:
        """Groups instead of rows."""
        rows = super()._batches(dataset, batch_size, epochs)
        producer = RolloutProducer(rows, self._collect, lambda: self._asked_steps, max_off_policy_steps=self.staleness)
        with producer:
            yield from producer

    def _collect(self, rows: Sequence[Mapping[str, Any]], version: int, seed: int) -> list[Group]:
        sampler = self._samplers[version].result()
        seed += self.seed * 1_000_003
        return self._collector.groups(sampler, rows, self.group_size, self.sampling, version, seed * _STEPS_APART)

    def _ask(self, items: Sequence[Any], learning_rate: float) -> Answer:
        groups: list[Group] = list(items)
        metrics = rl_metrics.of_groups(groups, version=self._asked_steps)
        data, behaviour, more = self._data(groups)
        metrics |= more
        self._asked_steps += 1
        gradient = None
        if data:
            gradient = self.run.forward_backward(data, self.variant.loss, loss_fn_config=self._loss_config)
        stepped = self.run.optim_step(self._step_params(learning_rate)) if data else None
        self._samplers[self._asked_steps] = self.run.save_weights_and_get_sampling_client()
        self._samplers.pop(self._asked_steps - self.staleness - 2, None)
        self.rollouts.append(self._asked_steps, groups)

        def answer() -> Metrics:
            if gradient is None or stepped is None:
                return metrics | {"loss": 0.0, "optim/grad_norm": 0.0}
            result = gradient.result()
            now = [scored(output) for output in result.loss_fn_outputs]
            return (
                metrics
                | {"loss": result.metrics["loss:sum"]}
                | {"optim/grad_norm": (stepped.result().metrics or {}).get("grad_norm", float("nan"))}
                | rl_metrics.of_ratios(now, behaviour, self._loss_config)
            )

        return answer
