"""A pole is balanced: a control policy in a few lines.

python examples/ppo_cartpole.py
"""

from torch import nn

from gradserve import PPOTrainer


def main() -> None:
    """Train for 60 epochs of 1024 steps, then play 20 whole episodes; the best possible return is 500."""
    policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    with PPOTrainer(policy_net=policy, env_config={"id": "CartPole-v1"}, rollout_batch_size=1024) as trainer:
        history = trainer.train(max_epochs=60)
        print(f"training: {history[0]['episode_return']:.0f} -> {history[-1]['episode_return']:.0f}")
        print(f"evaluation: {trainer.evaluate(20)['episode_return']:.0f} of 500")
        print(trainer.policy)


if __name__ == "__main__":
    main()
