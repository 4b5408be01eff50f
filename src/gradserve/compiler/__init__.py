"""On the user's machine: Python functions and modules become graphs (wire/graph.py). Needs torch.

    losses       capture_loss, loss: a function of named tensors
    modules      capture_module, capture_program: an nn.Module, or a function of one
    capture      what both have in common: a function of a dict of tensors
    declare      "float32[token, 5]": dtypes and shapes of inputs
    tracing      torch.export, watched: what a graph can't hold is refused where the user wrote it
    lowering     the exported program -> Graph
    refusals     CaptureError: file and line, the reason, the cure

Only two files compute something here, for losses that take the client-side road:

    client_side  ClientLoss: what can't be captured, where that was asked for
    foreign      numpy_loss, jax_loss, tensorflow_loss

torch is imported when one of these is first used, so that a client without it can import gradserve.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gradserve.compiler.refusals import CaptureError

if TYPE_CHECKING:
    from gradserve.compiler.losses import Loss, capture_loss, loss
    from gradserve.compiler.modules import capture_module, capture_program

__all__ = ["CaptureError", "Loss", "capture_loss", "capture_module", "capture_program", "loss"]

_HOMES = {
    "Loss": "losses",
    "capture_loss": "losses",
    "capture_module": "modules",
    "capture_program": "modules",
    "loss": "losses",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"gradserve.compiler.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'gradserve.compiler' has no attribute {name!r}")
