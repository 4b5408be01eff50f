"""What to train with where the user does not say: PPO's settings per environment.

From the tuned hyperparameters of RL Baselines3 Zoo (Raffin 2020, hyperparams/ppo.yml), to which its published scores
belong; for an environment it does not list, the defaults of Stable-Baselines3. n_envs, n_steps, batch_size and n_epochs
there are num_envs, steps, minibatch_size and epochs here; normalize is both normalisations. State-dependent exploration
(use_sde there: Pendulum, MountainCarContinuous) is not built: those train with a Gaussian of one deviation per action.

>>> defaults_for("CartPole-v1").ppo.epochs
20
"""

from __future__ import annotations

import re

import msgspec

from gradserve.wire.control import PPOConfig


class ControlDefaults(msgspec.Struct, frozen=True):
    """One environment's settings.

    ``total_steps`` of all environments together. ``normalise``: observations and rewards. ``linear``: learning rate
    and clip range fall linearly to 0 over the training; the client sends each update's values. ``hidden``,
    ``activation`` and ``log_std`` shape the policy and the critic of a client that makes them itself.
    """

    num_envs: int = 1
    steps: int = 2048
    total_steps: int = 1_000_000
    normalise: bool = False
    linear: bool = False
    ppo: PPOConfig = PPOConfig()
    hidden: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    log_std: float = 0.0


def defaults_for(env_id: str) -> ControlDefaults:
    """By the id without its version, since the zoo tuned older ones; Stable-Baselines3's own for others."""
    return TUNED.get(re.sub(r"-v\d+$", "", env_id), ControlDefaults())


def _mujoco(steps: int, total_steps: int = 1_000_000, **ppo: float | int) -> ControlDefaults:
    """The zoo's tuned settings of MuJoCo tasks, with wide networks of ReLU."""
    wide = {"hidden": (256, 256), "activation": "relu", "log_std": -2.0}
    return msgspec.convert(
        {"steps": steps, "total_steps": total_steps, "normalise": True, "ppo": ppo, **wide}, ControlDefaults
    )


TUNED = {
    "CartPole": ControlDefaults(
        num_envs=8,
        steps=32,
        total_steps=100_000,
        linear=True,
        ppo=PPOConfig(minibatch_size=256, epochs=20, gamma=0.98, gae_lambda=0.8, learning_rate=1e-3),
    ),
    "Pendulum": ControlDefaults(
        num_envs=4, steps=1024, total_steps=100_000, ppo=PPOConfig(gamma=0.9, learning_rate=1e-3)
    ),
    "Acrobot": ControlDefaults(num_envs=16, steps=256, normalise=True, ppo=PPOConfig(epochs=4, gae_lambda=0.94)),
    "MountainCar": ControlDefaults(num_envs=16, steps=16, normalise=True, ppo=PPOConfig(epochs=4, gae_lambda=0.98)),
    "MountainCarContinuous": ControlDefaults(
        steps=8,
        total_steps=20_000,
        normalise=True,
        log_std=-3.29,
        ppo=PPOConfig(
            minibatch_size=256,
            gamma=0.9999,
            learning_rate=7.77e-5,
            ent_coef=0.00429,
            clip_range=0.1,
            gae_lambda=0.9,
            max_grad_norm=5,
            vf_coef=0.19,
        ),
    ),
    "LunarLander": ControlDefaults(
        num_envs=16, steps=1024, ppo=PPOConfig(epochs=4, gae_lambda=0.98, gamma=0.999, ent_coef=0.01)
    ),
    "LunarLanderContinuous": ControlDefaults(
        num_envs=16, steps=1024, ppo=PPOConfig(epochs=4, gae_lambda=0.98, gamma=0.999, ent_coef=0.01)
    ),
    "BipedalWalker": ControlDefaults(
        num_envs=32, total_steps=5_000_000, normalise=True, ppo=PPOConfig(gamma=0.999, clip_range=0.18)
    ),
    "BipedalWalkerHardcore": ControlDefaults(
        num_envs=16,
        total_steps=100_000_000,
        normalise=True,
        linear=True,
        ppo=PPOConfig(ent_coef=0.001, learning_rate=2.5e-4),
    ),
    "Ant": ControlDefaults(normalise=True),
    "Swimmer": ControlDefaults(normalise=True, ppo=PPOConfig(gamma=0.9999)),
    "InvertedDoublePendulum": ControlDefaults(
        steps=128,
        normalise=True,
        ppo=PPOConfig(
            minibatch_size=512,
            gamma=0.98,
            learning_rate=0.000155454,
            ent_coef=1.05057e-06,
            clip_range=0.4,
            gae_lambda=0.8,
            vf_coef=0.695929,
        ),
    ),
    "InvertedPendulum": ControlDefaults(
        steps=32,
        normalise=True,
        ppo=PPOConfig(
            epochs=5,
            gamma=0.999,
            learning_rate=0.000222425,
            ent_coef=1.37976e-07,
            clip_range=0.4,
            gae_lambda=0.9,
            max_grad_norm=0.3,
            vf_coef=0.19816,
        ),
    ),
    "Reacher": ControlDefaults(
        steps=512,
        normalise=True,
        ppo=PPOConfig(
            minibatch_size=32,
            epochs=5,
            gamma=0.9,
            learning_rate=0.000104019,
            ent_coef=7.52585e-08,
            clip_range=0.3,
            gae_lambda=1.0,
            max_grad_norm=0.9,
            vf_coef=0.950368,
        ),
    ),
    "HalfCheetah": _mujoco(
        512,
        minibatch_size=64,
        epochs=20,
        gamma=0.98,
        learning_rate=2.0633e-05,
        ent_coef=0.000401762,
        clip_range=0.1,
        gae_lambda=0.92,
        max_grad_norm=0.8,
        vf_coef=0.58096,
    ),
    "Hopper": _mujoco(
        512,
        minibatch_size=32,
        epochs=5,
        gamma=0.999,
        learning_rate=9.80828e-05,
        ent_coef=0.00229519,
        clip_range=0.2,
        gae_lambda=0.99,
        max_grad_norm=0.7,
        vf_coef=0.835671,
    ),
    "Walker2d": _mujoco(
        512,
        minibatch_size=32,
        epochs=20,
        gamma=0.99,
        learning_rate=5.05041e-05,
        ent_coef=0.000585045,
        clip_range=0.1,
        gae_lambda=0.95,
        max_grad_norm=1.0,
        vf_coef=0.871923,
    ),
    "Humanoid": _mujoco(
        512,
        10_000_000,
        minibatch_size=256,
        epochs=5,
        gamma=0.95,
        learning_rate=3.56987e-05,
        ent_coef=0.00238306,
        clip_range=0.3,
        gae_lambda=0.9,
        max_grad_norm=2.0,
        vf_coef=0.431892,
    ),
    "HumanoidStandup": _mujoco(
        512,
        10_000_000,
        minibatch_size=32,
        epochs=20,
        gamma=0.99,
        learning_rate=2.55673e-05,
        ent_coef=3.62109e-06,
        clip_range=0.3,
        gae_lambda=0.9,
        max_grad_norm=0.7,
        vf_coef=0.430793,
    ),
}
