"""RLTrainer: its gradients against plain peft, what it learns, and what becomes of rewards that fail."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from torch import Tensor

import gradserve
from gradserve.algorithms.rl import RLTrainer
from gradserve.algorithms.rollouts.store import RolloutStore
from gradserve.algorithms.training_loop import Event
from gradserve.client import download
from gradserve.episodes.episode import Episode
from gradserve.tracking.names import meaning
from tests.integration.rewards_for_tests import Twice, breaks_on_vowels, digits
from tests.numerics import reference

RANK = 4
ROWS = [{"prompt": f"say {number}"} for number in range(12)]


@pytest.fixture
def service(url: str) -> tinker.ServiceClient:
    return gradserve.connect(url)


def trainer_of(service: tinker.ServiceClient, folder: Path, reward: Any = digits, **settings: Any) -> RLTrainer:
    given = {"group_size": 8, "max_tokens": 5, "rank": RANK, "learning_rate": 1e-2, "reward_workers": 1, **settings}
    return RLTrainer("tiny", reward, service=service, log_dir=folder, **given)


def loss_by_hand(model: Any, groups: Sequence[Sequence[Episode]], algorithm: str, max_tokens: int) -> Tensor:
    """The papers' objectives, episode by episode; on the policy that sampled, where no ratio is clipped."""
    total = torch.zeros(())
    lengths = sum(episode.sampled for group in groups for episode in group)
    for group in groups:
        rewards = [episode.reward or 0.0 for episode in group]
        spread = statistics.stdev(rewards)
        for episode, reward in zip(group, rewards, strict=True):
            tokens = torch.tensor(episode.tokens)
            found = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
            logprobs = found.gather(1, tokens[1:, None])[:, 0]
            mask = torch.tensor(episode.mask[1:])
            log_ratio = (logprobs - torch.tensor(episode.logprobs[1:])) * mask
            centred = reward - statistics.fmean(rewards)
            share = 1 / (len(groups) * len(group))
            if algorithm == "grpo":
                total = total - share * centred / (spread + 1e-4) * (log_ratio.exp() * mask).sum() / mask.sum()
            elif algorithm == "dr_grpo":
                total = total - share * centred * (log_ratio.exp() * mask).sum() / max_tokens
            elif algorithm == "gspo":
                total = total - share * centred / (spread + 1e-4) * (log_ratio.sum() / mask.sum()).exp()
            else:
                total = total - centred * (log_ratio.exp() * mask).sum() / lengths
    return total


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "gspo", "reinforce"])
def test_the_first_gradient_is_that_of_the_papers_formula(
    algorithm: str, service: tinker.ServiceClient, url: str, tiny_models: dict[str, str], tmp_path: Path
) -> None:
    trainer = trainer_of(service, tmp_path / "log", algorithm=algorithm, seed=3)
    history = trainer.fit(ROWS, batch_size=6, max_steps=1).history
    with RolloutStore(tmp_path / "log/rollouts.sqlite", read_only=True) as store:
        ((_, groups),) = store.replay()
    twin = service.create_lora_training_client(base_model="tiny", rank=RANK, seed=3).result()
    adapter = tmp_path / "adapter.safetensors"
    download.weights(url, twin.save_state("begun").result().path, "tml-local", adapter)
    model = reference.load_peft(Path(tiny_models["tiny"]), adapter, tmp_path / "peft", RANK)
    differing = [group for group in groups if len({episode.reward for episode in group}) > 1]
    assert differing, "there is something to learn"
    shares = len(differing) / len(groups)
    tokens = sum(each.sampled for group in groups for each in group)
    kept = sum(each.sampled for group in differing for each in group)
    scale = kept / tokens if algorithm == "reinforce" else shares  # means are over all groups
    (loss_by_hand(model, differing, algorithm, 5) * scale).backward()  # type: ignore[no-untyped-call]
    gradients = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    assert history[0]["optim/grad_norm"] == pytest.approx(float(torch.stack(gradients).norm()), rel=2e-3)
    assert history[0]["policy/mismatch_max"] < 1e-5
    assert history[0]["reward/zero_advantage_groups"] == pytest.approx(1 - shares)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_task_from_near_0_to_over_09(algorithm: str, service: tinker.ServiceClient, tmp_path: Path) -> None:
    trainer = trainer_of(service, tmp_path, algorithm=algorithm, group_size=16, rank=8)
    fitted = trainer.fit(ROWS, eval_data=ROWS[:6], epochs=9, batch_size=4, max_steps=14)
    assert fitted.evaluations[0]["eval/reward"] < 0.2
    assert fitted.evaluations[-1]["eval/reward"] > 0.9
    prompt = trainer.tokenizer.apply_chat_template(
        [{"role": "user", "content": "say 99"}], add_generation_prompt=True, return_dict=False
    )
    params = tinker.SamplingParams(max_tokens=5, temperature=0)
    said = trainer.model.sample(tinker.ModelInput.from_ints(prompt), 1, params).result().sequences[0]
    assert digits(trainer.tokenizer.decode(said.tokens)) > 0.9, "trainer.model samples from what was trained"


def test_a_reward_that_fails_is_counted_and_never_trained_on(service: tinker.ServiceClient, tmp_path: Path) -> None:
    trainer = trainer_of(service, tmp_path, breaks_on_vowels, reward_retries=0)
    (step,) = trainer.fit(ROWS, batch_size=4, max_steps=1).history
    with RolloutStore(tmp_path / "rollouts.sqlite", read_only=True) as store:
        ((_, groups),) = store.replay()
    episodes = [episode for group in groups for episode in group]
    failed = [episode for episode in episodes if episode.failure is not None]
    assert 0 < len(failed) < len(episodes)
    assert all("a vowel" in episode.failure.detail for episode in failed if episode.failure)
    assert all(episode.reward is None for episode in failed)
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    assert step["reward/mean"] == pytest.approx(statistics.fmean(rewards))
    assert step["episode/failed/crash"] == len(failed)
    assert step["reward/part/length"] > 0


def test_rollouts_ahead_are_never_staler_than_allowed(service: tinker.ServiceClient, tmp_path: Path) -> None:
    trainer = trainer_of(
        service, tmp_path, max_off_policy_steps=2, importance_correction="truncated", importance_cap=1.5
    )
    history = trainer.fit(ROWS, epochs=3, batch_size=4).history
    stale = [step["policy/staleness_max"] for step in history]
    assert max(stale) <= 2
    assert any(stale), "something was sampled ahead"
    assert [name for step in history for name in step if name != "step" and meaning(name) is None] == []
    assert all(step["importance/max"] <= 1.5 for step in history if "importance/max" in step)
    with RolloutStore(tmp_path / "rollouts.sqlite", read_only=True) as store:
        trained = [group[0].row["prompt"] for _, groups in store.replay() for group in groups]
    for epoch in range(3):
        assert sorted(trained[12 * epoch : 12 * epoch + 12]) == sorted(row["prompt"] for row in ROWS)


class PowerCut(Exception):
    pass


def test_a_run_that_is_taken_up_again_goes_where_it_would_have(service: tinker.ServiceClient, tmp_path: Path) -> None:
    def cut(event: Event) -> None:
        if event.kind == "step" and event.step == 3:
            raise PowerCut

    def told(step: dict[str, float]) -> dict[str, float]:
        return {name: value for name, value in step.items() if not name.startswith("time/")}

    settings: dict[str, Any] = {"epochs": 2, "batch_size": 4, "checkpoint_every": 2}
    straight = trainer_of(service, tmp_path / "whole").fit(ROWS, **settings)
    with pytest.raises(PowerCut):
        trainer_of(service, tmp_path / "cut").fit(ROWS, callbacks=[cut], **settings)
    again = trainer_of(service, tmp_path / "cut").fit(ROWS, resume=True, **settings)
    for found, wanted in zip(again.history, straight.history[2:], strict=True):
        assert told(found) == pytest.approx(told(wanted), rel=1e-4, abs=1e-5)  # fast numerics: rows share passes
    with RolloutStore(tmp_path / "cut/rollouts.sqlite", read_only=True) as store:
        assert [step for step, _ in store.replay()] == [1, 2, 3, 4, 5, 6]


def test_the_reference_holds_the_policy_back(service: tinker.ServiceClient, tmp_path: Path) -> None:
    free, held = (
        trainer_of(service, tmp_path / str(kl), kl_coef=kl).fit(ROWS, epochs=4, batch_size=4, max_steps=8).history
        for kl in (1e-9, 1.0)
    )
    assert held[0]["policy/kl_k1"] == pytest.approx(0, abs=1e-5), "adapters begin as nothing"
    assert held[-1]["policy/kl_k3"] < 0.5 * free[-1]["policy/kl_k3"]


def test_episodes_of_several_turns(service: tinker.ServiceClient, tmp_path: Path) -> None:
    config = {"environment": Twice, "max_turns": 3}
    history = trainer_of(service, tmp_path, None, env_config=config).fit(ROWS, batch_size=6, max_steps=6).history
    assert history[0]["episode/turns_mean"] == 2
    assert history[-1]["reward/mean"] > history[0]["reward/mean"]


def test_arguments_that_do_not_fit_are_refused_before_anything_is_sampled(
    service: tinker.ServiceClient, tmp_path: Path
) -> None:
    for settings, said in (
        ({"algorithm": "gppo"}, "algorithm is 'gppo': give one of grpo"),
        ({"group_size": 1}, "group_size is 1"),
        ({"importance_correction": "some"}, "give one of none, truncated"),
        ({"max_off_policy_steps": -1}, "at least 0"),
        ({"env_config": {"max_turn": 3}}, "did you mean 'max_turns'"),
    ):
        with pytest.raises(ValueError, match=said):
            trainer_of(service, tmp_path, **settings)
    with pytest.raises(ValueError, match="there is no reward"):
        trainer_of(service, tmp_path, None)
