"""gradserve.PPOTrainer: control policies through the service."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import tinker
import torch
from gymnasium import spaces
from torch import nn

import gradserve
from gradserve.algorithms.actor_critic import NormalisedPolicy
from gradserve.client.connect import EmbeddedServiceClient
from gradserve.compute.engine.control.noise import episode_seed

EXAMPLES = Path(__file__).parents[2] / "examples"
CARTPOLE = {"id": "CartPole-v1"}
PENDULUM = {"id": "Pendulum-v1", "max_episode_steps": 40}


@pytest.fixture
def service(url: str) -> tinker.ServiceClient:
    """A client of the shared server."""
    return gradserve.connect(url)


def perceptron(inputs: int, outputs: int, seed: int = 0) -> nn.Module:
    """A plain module without a critic."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


def play(policy: nn.Module, env: Any, seed: int) -> float:
    """The return of one episode by the likeliest discrete actions."""
    seen, total, over = env.reset(seed=seed)[0], 0.0, False
    while not over:
        with torch.no_grad():
            action = int(policy(torch.as_tensor(seen)[None]).argmax())
        seen, reward, terminated, truncated, _ = env.step(action)
        total, over = total + float(reward), terminated or truncated
    return total


def weights_of(trainer: gradserve.PPOTrainer) -> dict[str, torch.Tensor]:
    """All that was trained."""
    return trainer.actor_critic.state_dict()


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Of every tensor."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


class Matching(gymnasium.Env[Any, Any]):
    """A user's own environment: each of 8 steps shows two bits; both are to be answered. At most 2 per step."""

    observation_space: Any = spaces.Box(0, 1, (2,), np.float32)
    action_space: Any = spaces.MultiDiscrete([2, 2])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = 8
        return self._show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float((action == self.bits).sum())
        self.left -= 1
        return self._show(), reward, self.left == 0, False, {}

    def _show(self) -> Any:
        self.bits = self.np_random.integers(0, 2, 2)
        return self.bits.astype(np.float32)


class Nested(gymnasium.Env[Any, Any]):
    """Dict observations and Dict actions: say which of three it is, and how much. At most 1 per step, 8 steps."""

    observation_space: Any = spaces.Dict({"kind": spaces.Discrete(3), "much": spaces.Box(-1, 1, (1,), np.float32)})
    action_space: Any = spaces.Dict({"kind": spaces.Discrete(3), "much": spaces.Box(-1, 1, (1,), np.float32)})

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = 8
        return self._show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = 0.5 * (action["kind"] == self.kind) + 0.5 - 0.25 * abs(float(action["much"][0] - self.much))
        self.left -= 1
        return self._show(), float(reward), self.left == 0, False, {}

    def _show(self) -> Any:
        self.kind, self.much = int(self.np_random.integers(3)), float(self.np_random.uniform(-1, 1))
        return {"kind": self.kind, "much": np.array([self.much], np.float32)}


class Switches(gymnasium.Env[Any, Any]):
    """Images, and a Tuple of bits and a number: two pixels say which to turn on. At most 3 per step, 8 steps."""

    observation_space: Any = spaces.Box(0, 255, (2, 1, 1), np.uint8)
    action_space: Any = spaces.Tuple((spaces.MultiBinary(2), spaces.Box(-1, 1, (1,), np.float32)))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = 8
        return self._show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        bits, number = action
        reward = float((bits == self.bits).sum()) + 1 - abs(float(number[0]))
        self.left -= 1
        return self._show(), reward, self.left == 0, False, {}

    def _show(self) -> Any:
        self.bits = self.np_random.integers(0, 2, 2)
        return (self.bits * 255).astype(np.uint8).reshape(2, 1, 1)


def test_cartpole_is_solved_and_the_policy_is_a_module(service: tinker.ServiceClient) -> None:
    trainer = gradserve.PPOTrainer(perceptron(4, 2), CARTPOLE, 1024, service=service)
    history = trainer.train(max_epochs=50)
    assert [row["epoch"] for row in history] == list(range(1, 51))
    assert history[-1]["env_steps"] <= 50 * 1024
    assert history[0]["episode_return"] < 60
    assert trainer.evaluate(20)["returns"] == [500.0] * 20
    policy = trainer.policy
    assert isinstance(policy, nn.Sequential)
    assert play(policy, gymnasium.make("CartPole-v1"), seed=5) == 500


def test_a_box_of_actions_with_normalisation_is_evaluated_as_the_policy_acts(service: tinker.ServiceClient) -> None:
    trainer = gradserve.PPOTrainer(
        perceptron(3, 1), PENDULUM, 256, service=service, normalise_observations=True, normalise_rewards=True
    )
    trainer.train(max_epochs=3)
    policy = trainer.policy
    assert isinstance(policy, NormalisedPolicy)
    evaluated = trainer.evaluate(3, seed=7)["returns"]
    env = gymnasium.make("Pendulum-v1", max_episode_steps=40)
    for number, expected in enumerate(evaluated):
        seen, total = env.reset(seed=episode_seed(7, number, 0))[0], 0.0
        for _ in range(40):
            with torch.no_grad():
                action = policy(torch.as_tensor(seen)[None])[0].clamp(-2, 2).numpy()
            seen, reward, *_ = env.step(action)
            total += float(reward)
        assert total == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("env", "policy", "best"), [(Matching, perceptron(2, 4), 16), (Nested, perceptron(4, 4), 8), (Switches, None, 24)]
)
def test_environments_of_the_users_own_class_are_learned(
    env: Any, policy: nn.Module | None, best: int, service: tinker.ServiceClient
) -> None:
    trainer = gradserve.PPOTrainer(
        policy, {"class": env}, 512, num_envs=16, service=service, learning_rate="linear_1e-3", gamma=0.0
    )
    before = trainer.evaluate(20)["episode_return"]
    trainer.train(max_epochs=15)
    after = trainer.evaluate(20)["episode_return"]
    assert before < 0.85 * best
    assert after > 0.93 * best


def test_the_client_and_the_server_roll_out_the_same(service: tinker.ServiceClient) -> None:
    made = {"class": gymnasium.make, "kwargs": {"id": "Pendulum-v1", "max_episode_steps": 40}}
    both = []
    for config in (PENDULUM, made):
        trainer = gradserve.PPOTrainer(
            perceptron(3, 1), config, 128, num_envs=4, envs_per_task=2, service=service, epochs=2,
            learning_rate=1e-3, gamma=0.9,  # the defaults of an id are not those of a class
            normalise_observations=True, normalise_rewards=True,
        )  # fmt: skip
        both.append((trainer.train(max_epochs=3), weights_of(trainer), trainer.evaluate(2)))
    (history, weights, evaluation), (own_history, own_weights, own_evaluation) = both
    assert_same_bits(weights, own_weights)
    assert history == own_history
    assert evaluation == own_evaluation


@pytest.mark.parametrize("config", [PENDULUM, {"class": Matching}], ids=["server", "client"])
def test_resumed_is_bitwise_undisturbed(config: dict[str, Any], service: tinker.ServiceClient) -> None:
    policy = perceptron(3, 1) if config is PENDULUM else perceptron(2, 4)
    settings: dict[str, Any] = {
        "learning_rate": "linear_1e-3", "normalise_observations": True, "normalise_rewards": True, "epochs": 2,
    }  # fmt: skip
    undisturbed = gradserve.PPOTrainer(policy, config, 132, num_envs=4, service=service, **settings)
    expected = undisturbed.train(max_epochs=4)
    first = gradserve.PPOTrainer(policy, config, 132, num_envs=4, service=service, **settings)
    first.train(max_epochs=4, callback=lambda row: row["epoch"] == 2)
    path = first.save("half")
    second = gradserve.PPOTrainer(policy, config, service=service, resume=path)
    assert second.train(max_epochs=4) == expected[2:]
    assert_same_bits(weights_of(undisturbed), weights_of(second))
    assert undisturbed.evaluate(2) == second.evaluate(2)


def test_an_actor_critic_of_the_users_is_trained_as_it_is(service: tinker.ServiceClient) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.actor, self.critic = nn.Linear(4, 16), nn.Linear(16, 2), nn.Linear(16, 1)

        def forward(self, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            seen = torch.tanh(self.body(observations))
            return self.actor(seen), self.critic(seen)

    policy = Shared()
    trainer = gradserve.PPOTrainer(policy, CARTPOLE, service=service)
    trainer.train(max_epochs=1)
    weights = weights_of(trainer)
    assert {name.partition(".")[0] for name in weights} == {"policy"}
    assert not torch.equal(weights["policy.critic.weight"], policy.critic.weight)


def test_a_checkpoint_of_another_module_is_refused(service: tinker.ServiceClient) -> None:
    path = gradserve.PPOTrainer(perceptron(4, 2), CARTPOLE, service=service).save("start")
    with pytest.raises(ValueError, match="of another module"):
        gradserve.PPOTrainer(nn.Linear(4, 2), CARTPOLE, service=service, resume=path)


def test_a_callback_sees_each_epoch_and_may_end_the_training(service: tinker.ServiceClient) -> None:
    trainer = gradserve.PPOTrainer(None, CARTPOLE, service=service)
    rates = []

    def look(row: dict[str, float]) -> bool:
        rates.append(row["learning_rate"])
        return len(rates) == 3

    history = trainer.train(max_epochs=10, callback=look, checkpoint_every=2)
    assert len(history) == 3
    assert rates == pytest.approx([1e-3, 0.9e-3, 0.8e-3])  # rl-zoo3 anneals CartPole's
    assert trainer.train(max_epochs=4)[-1]["epoch"] == 4
    assert gradserve.PPOTrainer(None, CARTPOLE, service=service, resume=f"tinker://{trainer.run_id}/weights/epoch-2")


def test_what_does_not_fit_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(TypeError, match=r"no setting 'learning_rat'; it has .*learning_rate"):
        gradserve.PPOTrainer(None, CARTPOLE, learning_rat=1e-3)
    with pytest.raises(ValueError, match=r"gives a tensor \[3, 3\].* a tensor \[3, 2\] \(2 logits\)"):
        gradserve.PPOTrainer(perceptron(4, 3), CARTPOLE)
    with pytest.raises(ValueError, match=r"gamma: 1.5 is not in \[0, 1\]"):
        gradserve.PPOTrainer(None, CARTPOLE, gamma=1.5)
    with pytest.raises(ValueError, match="'CartPole-v99' is not registered"):
        gradserve.PPOTrainer(None, {"id": "CartPole-v99"})
    with pytest.raises(ValueError, match="1000 is no multiple of num_envs 3"):
        gradserve.PPOTrainer(None, CARTPOLE, 1000, num_envs=3)
    with pytest.raises(ValueError, match="'quickly' is no schedule"):
        gradserve.PPOTrainer(None, CARTPOLE, learning_rate="quickly")
    with pytest.raises(TypeError, match="say which environment"):
        gradserve.PPOTrainer(None, {})
    with pytest.raises(TypeError, match="no 'seed'"):
        gradserve.PPOTrainer(None, {**CARTPOLE, "seed": 1})


def test_no_language_model_is_needed(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(data_dir))
    with gradserve.PPOTrainer(None, CARTPOLE) as trainer:
        assert isinstance(trainer._service, EmbeddedServiceClient)
        assert trainer._service.server.models == []
        assert len(trainer.train(max_epochs=1)) == 1


def test_the_example_runs(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GRADSERVE_URL", url)
    monkeypatch.setattr(gradserve.PPOTrainer, "train", _briefly)
    runpy.run_path(str(EXAMPLES / "ppo_cartpole.py"), run_name="__main__")
    assert "evaluation: " in capsys.readouterr().out


def _briefly(self: gradserve.PPOTrainer, max_epochs: int, train: Any = gradserve.PPOTrainer.train) -> Any:
    """The example's sixty epochs are another test's."""
    assert max_epochs == 60
    return train(self, max_epochs=2)
