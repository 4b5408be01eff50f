"""A module as its weights and its graph: the checkpoint's own bytes, and how to load them with or without its class."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from gradserve.compute.checkpoints import GRAPH_FILE
from gradserve.compute.engine.export.module_parity import Outputs, Run, arrays
from gradserve.compute.engine.graphs.module import load_module
from gradserve.compute.engine.lora import Tensors
from gradserve.compute.exports import ModuleSource
from gradserve.wire import graph as ir

WEIGHTS = "model.safetensors"
LIBRARIES: tuple[str, ...] = ("safetensors",)
BOUND = 1e-6
"""The same operators on the same bytes; products of matrices may still sum in an order that depends on where in memory
these lie (3e-8 was seen)."""

_README = """# {name}, trained with gradserve

`{weights}` holds the module's parameters and buffers under its own names, `{graph}` its forward pass as data
(gradserve's docs/reference/graph-ir.md). `gradserve_export.json` says where they come from and how they were checked.

With the module's own class:

```python
from safetensors.torch import load_file

model.load_state_dict(load_file("{weights}"), strict=False)  # shared parameters are stored once, under one name
```

Without it (`pip install 'gradserve[server]'`):

```python
import gradserve

model = gradserve.load_module(".")  # a torch.nn.Module
model({call})
```

Inputs: {inputs}. Outputs: {outputs}.
"""


def require() -> None:
    """Nothing beyond what the engine needs."""


def write(source: ModuleSource, graph: ir.Graph, weights: Tensors, folder: Path) -> None:
    """Write weights, graph and README.md."""
    shutil.copyfile(source.weights, folder / WEIGHTS)
    (folder / GRAPH_FILE).write_bytes(source.graph)
    (folder / "README.md").write_text(_readme(graph))


def load(graph: ir.Graph, folder: Path) -> Run:
    """As a user of the folder loads it."""
    module = load_module(folder)

    @torch.no_grad()
    def run(batch: Tensors) -> Outputs:
        result = module(**batch) if all(map(str.isidentifier, batch)) else module(*batch.values())
        return arrays(result if isinstance(result, dict) else {"output": result})

    return run


def _readme(graph: ir.Graph) -> str:
    inputs = [given for given in graph.inputs if given.kind == "input"]
    return _README.format(
        name=graph.name,
        weights=WEIGHTS,
        graph=GRAPH_FILE,
        call=", ".join(given.name for given in inputs),
        inputs=", ".join(f"`{given.name}` {given.dtype}[{', '.join(map(str, given.shape))}]" for given in inputs),
        outputs=", ".join(f"`{output.name}`" for output in graph.outputs),
    )
