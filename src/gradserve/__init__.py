"""gradserve: serves gradients. ``gradserve.connect()`` gives a tinker ServiceClient; see README.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradserve.algorithms.distill import DistillTrainer
    from gradserve.algorithms.dpo import DPOTrainer
    from gradserve.algorithms.fit import fit
    from gradserve.algorithms.ppo import PPOTrainer
    from gradserve.algorithms.reward_model import RewardModelTrainer
    from gradserve.algorithms.rl import RLTrainer
    from gradserve.algorithms.sft import SFTTrainer
    from gradserve.algorithms.stopping import EarlyStop
    from gradserve.client.connect import connect
    from gradserve.client.full import create_full_training_client, create_lora_training_client
    from gradserve.client.modules import ModuleClient
    from gradserve.client.state import get_client_state, set_client_state
    from gradserve.compiler.client_side import forward_backward
    from gradserve.compiler.foreign import jax_loss, numpy_loss, tensorflow_loss
    from gradserve.compiler.losses import loss
    from gradserve.compute.engine.graphs.module import load_module
    from gradserve.data.contamination import contamination
    from gradserve.data.dataset import Dataset
    from gradserve.data.errors import BadRow, DataError

__version__ = "0.1.0"
__all__ = [
    "BadRow",
    "DPOTrainer",
    "DataError",
    "Dataset",
    "DistillTrainer",
    "EarlyStop",
    "ModuleClient",
    "PPOTrainer",
    "RLTrainer",
    "RewardModelTrainer",
    "SFTTrainer",
    "__version__",
    "connect",
    "contamination",
    "create_full_training_client",
    "create_lora_training_client",
    "fit",
    "forward_backward",
    "get_client_state",
    "jax_loss",
    "load_module",
    "loss",
    "numpy_loss",
    "set_client_state",
    "tensorflow_loss",
]

_HOMES = {
    "BadRow": "data.errors",
    "DPOTrainer": "algorithms.dpo",
    "DataError": "data.errors",
    "Dataset": "data.dataset",
    "DistillTrainer": "algorithms.distill",
    "EarlyStop": "algorithms.stopping",
    "ModuleClient": "client.modules",
    "PPOTrainer": "algorithms.ppo",
    "RLTrainer": "algorithms.rl",
    "RewardModelTrainer": "algorithms.reward_model",
    "SFTTrainer": "algorithms.sft",
    "connect": "client.connect",
    "contamination": "data.contamination",
    "create_full_training_client": "client.full",
    "create_lora_training_client": "client.full",
    "fit": "algorithms.fit",
    "forward_backward": "compiler.client_side",
    "get_client_state": "client.state",
    "jax_loss": "compiler.foreign",
    "load_module": "compute.engine.graphs.module",
    "loss": "compiler.losses",
    "numpy_loss": "compiler.foreign",
    "set_client_state": "client.state",
    "tensorflow_loss": "compiler.foreign",
}
"""Where in gradserve each name is."""


def __getattr__(name: str) -> Any:
    # The tinker SDK and torch take a second each to import; only those who call them pay for it.
    if name in _HOMES:
        return getattr(importlib.import_module(f"gradserve.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'gradserve' has no attribute {name!r}")
