"""A graph as a torch module: its parameters and buffers under their own names, its forward pass the interpreter's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from gradserve.compute.checkpoints import GRAPH_FILE
from gradserve.compute.engine.graphs.executable import Executable
from gradserve.wire import graph as ir


class GraphModule(nn.Module):
    """Calls take the graph's inputs, in order or by name. The result is the tensor ``output``, or a dict of outputs."""

    def __init__(self, graph: ir.Graph, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._gradserve_graph = Executable(graph, max_constant_bytes=ir.MAX_BYTES)
        for name in graph.names("parameter"):
            owner, last = self._owner(name)
            trains = tensors[name].is_floating_point()
            owner.register_parameter(last, nn.Parameter(tensors[name].detach(), requires_grad=trains))
        for name in graph.names("buffer"):
            owner, last = self._owner(name)
            owner.register_buffer(last, tensors[name].detach())

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor | dict[str, Tensor]:
        """Raises Invalid (graph_input) for inputs that the graph does not take."""
        executable = self._gradserve_graph
        given = dict(zip(executable.graph.names("input"), inputs, strict=False)) | named
        weights = dict(self.named_parameters()) | dict(self.named_buffers())
        outputs = executable.run(given | weights)
        return outputs["output"] if list(outputs) == ["output"] else outputs

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        """The submodule that a tensor belongs to, made if need be, and the tensor's name in it."""
        *path, last = name.split(".")
        owner: nn.Module = self
        for part in path:
            if part not in dict(owner.named_children()):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        return owner, last


def load_module(folder: str | Path) -> GraphModule:
    """The module in a folder that ``gradserve export --format safetensors`` wrote, without the user's own class.

    Raises Invalid when a file was changed into something that is no graph, KeyError when a tensor is missing.
    """
    from safetensors.torch import load_file

    graph = ir.decode((Path(folder) / GRAPH_FILE).read_bytes())
    return GraphModule(graph, load_file(Path(folder) / "model.safetensors"))
