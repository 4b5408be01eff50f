"""GRPO by gradserve."""

from gradserve.algorithms.rl import RLTrainer


def train(model, rows, reward, *, seed, steps, learning_rate, max_tokens, callback=None):
    """``reward``: a function of a completion and its row's answer."""
    with RLTrainer(
        model, reward, max_tokens=max_tokens, rank=16, learning_rate=learning_rate, beta2=0.999, seed=seed
    ) as trainer:
        trainer.fit(rows, epochs=steps, batch_size=8, max_steps=steps, callbacks=[callback] if callback else [])
        return trainer.model
