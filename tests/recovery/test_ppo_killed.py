"""PPO while workers die and power is cut: the weights are those of an undisturbed run, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from gradserve.client.modules import ModuleClient
from gradserve.compiler.modules import capture_module
from gradserve.wire import graph as ir
from gradserve.wire.control import EnvSpec, PPOConfig, RolloutSpec
from tests.recovery.disaster import Machine, machine
from tests.sdk import client

ENV = EnvSpec("CartPole-v1")
SPEC = RolloutSpec(
    ENV, num_envs=6, steps=64, seed=3, envs_per_task=2, normalise_observations=True, normalise_rewards=True
)
CONFIG = PPOConfig(epochs=4, minibatch_size=64, learning_rate=1e-3)


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh())
        self.pi, self.vf = nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, observations: Tensor) -> dict[str, Tensor]:
        hidden = self.body(observations)
        return {"logits": self.pi(hidden), "value": self.vf(hidden).squeeze(-1)}


def started(url: str) -> ModuleClient:
    torch.manual_seed(0)
    graph, tensors = capture_module(ActorCritic(), torch.zeros(3, 4))
    return ModuleClient.create(client(url), ir.encode(graph).decode(), save(tensors))


def trained(run: ModuleClient, iterations: int, first: int = 0) -> None:
    for number in range(first, first + iterations):
        rollout, update = run.rollout(SPEC), run.update(ENV, CONFIG, seed=number)
        rollout.result()
        update.result()


def at_some_moment(disaster: Callable[[], None], work: Callable[[], None], after_s: float) -> None:
    timer = threading.Timer(after_s, disaster)
    timer.start()
    work()
    timer.join()


def states(run: ModuleClient) -> dict[str, Tensor]:
    found: dict[str, Tensor] = load(run.weights())
    return found


def test_ppo_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Environments live in workers only: the new ones play the actions again."""
    with machine({}, tmp_path, GRADSERVE_MODELS="{}") as place:
        calm = started(place.url)
        trained(calm, 8)
        shaken = started(place.url)
        at_some_moment(place.kill_workers, lambda: trained(shaken, 4), after_s=0.3)
        place.kill_workers()
        trained(shaken, 1, first=4)
        at_some_moment(lambda: _restart(place), lambda: trained(shaken, 3, first=5), after_s=0.1)
        assert states(calm).keys() == states(shaken).keys()
        for name, tensor in states(calm).items():
            assert torch.equal(states(shaken)[name], tensor), name
        kinds = {event["kind"] for event in place.events(shaken.run_id)}
        assert kinds & {"worker_lost", "recovered"}


def _restart(place: Machine) -> None:
    place.cut_power()
    place.start()


def test_a_checkpoint_has_all_that_ppo_needs(tmp_path: Path) -> None:
    """Six iterations, and three, a checkpoint, three more: environments and normalisation go on where they were."""
    with machine({}, tmp_path, GRADSERVE_MODELS="{}") as place:
        whole = started(place.url)
        trained(whole, 6)
        half = started(place.url)
        trained(half, 3)
        path = half.save("half").result()["path"]
        resumed = ModuleClient.load(client(place.url), path)
        trained(resumed, 3, first=3)
        assert all(torch.equal(tensor, states(resumed)[name]) for name, tensor in states(whole).items())
        fresh = ModuleClient.load(client(place.url), path, optimizer=False)
        trained(fresh, 1, first=3)  # new episodes and moments: allowed, and another result
        trained(half, 1, first=3)
        assert any(not torch.equal(tensor, states(half)[name]) for name, tensor in states(fresh).items())
