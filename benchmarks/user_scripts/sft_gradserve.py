"""Supervised fine-tuning on conversations by gradserve."""

from gradserve.algorithms.sft import SFTTrainer
from gradserve.data.dataset import Dataset


def train(model, rows, *, seed, steps, learning_rate, callback=None):
    """In the order of the rows; the assistant's turns are trained."""
    with SFTTrainer(model, rank=16, learning_rate=learning_rate, beta2=0.999, seed=seed) as trainer:
        trainer.fit(
            Dataset(rows), epochs=steps, batch_size=8, max_steps=steps, callbacks=[callback] if callback else []
        )
        return trainer.model
