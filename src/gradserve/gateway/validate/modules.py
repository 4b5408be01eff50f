"""Checks of requests about modules: graphs, weights and arrays."""

from __future__ import annotations

from typing import Final

from gradserve.compute.safetensors_file import BadFile, described
from gradserve.wire import graph as ir
from gradserve.wire.data import Array
from gradserve.wire.errors import Invalid
from gradserve.wire.graph import Graph

_DTYPES: Final = {"F32": "float32", "I64": "int64", "I32": "int32", "BOOL": "bool", "U8": "uint8", "F64": "float64"}
"""Of a module's parameters and buffers, as a safetensors file calls them and as a graph does."""


def module_graph(text: str) -> Graph:
    """A graph that came as text. Raises Invalid."""
    graph = ir.decode(text)
    ir.check_structure(graph, max_constant_bytes=ir.MAX_BYTES)
    if graph.over != "batch":
        raise Invalid(
            "graph.over", f"The graph {graph.name!r} is over rows; a module's is over a batch.", field="graph"
        )
    return graph


def check_weights(weights: bytes, graph: Graph) -> None:
    """Raises Invalid unless a safetensors file holds exactly the graph's parameters and buffers."""
    found = _header(weights, "weights")
    wanted = {given.name: given for given in graph.inputs if given.kind != "input"}
    for name in sorted(wanted.keys() | found.keys()):
        field = f"weights.{name}"
        if name not in found:
            raise Invalid("weights.missing", f"The weights lack {name!r}, which the graph reads.", field=field)
        if name not in wanted:
            raise Invalid("weights.unknown", f"The graph has no parameter or buffer {name!r}.", field=field)
        dtype, shape = found[name]
        if (dtype, shape) != (wanted[name].dtype, wanted[name].shape):
            raise Invalid(
                "weights.shape",
                f"{name!r} is {dtype}{shape}; the graph takes {wanted[name].dtype}{wanted[name].shape}.",
                field=field,
            )


def _header(file: bytes, field: str) -> dict[str, tuple[str, list[int]]]:
    """Dtype and shape of each tensor in a safetensors file. Raises Invalid unless the file is whole."""
    try:
        return {name: (_DTYPES[dtype], shape) for name, (dtype, shape) in described(file).items()}
    except (BadFile, KeyError) as error:
        raise Invalid(
            f"{field}.malformed",
            f"{field} is no safetensors file of {', '.join(_DTYPES.values())}: {error}.",
            field=field,
        ) from error


_TRAJECTORY: Final = {
    "actions": "float32",
    "logprobs": "float32",
    "values": "float32",
    "next_values": "float32",
    "rewards": "float32",
    "terminated": "bool",
    "truncated": "bool",
    "valid": "bool",
}


def check_trajectory(trajectory: bytes) -> None:
    """Raises Invalid unless a safetensors file holds what an update reads, T steps of n environments alike."""
    found = _header(trajectory, "trajectory")
    lead = found["logprobs"][1][:2] if "logprobs" in found else []
    for name in ("observations", *_TRAJECTORY):
        field = f"trajectory.{name}"
        if name not in found:
            raise Invalid("trajectory.missing", f"The trajectory lacks {name}.", field=field)
        dtype, shape = found[name]
        wanted = _TRAJECTORY.get(name, dtype)
        if dtype != wanted or len(lead) != 2 or shape[:2] != lead:
            raise Invalid(
                "trajectory.shape",
                f"{name} is {dtype}{shape}; it must be {wanted}, [steps, environments, ...] = {lead} like logprobs.",
                field=field,
            )


def check_arrays(arrays: dict[str, Array], graph: Graph) -> None:
    """Raises Invalid unless the arrays are the graph's inputs, in shapes that agree with each other."""
    sizes: dict[str, int] = {}
    wanted = {given.name: given for given in graph.inputs if given.kind == "input"}
    for name in sorted(wanted.keys() | arrays.keys()):
        field = f"arrays.{name}"
        if name not in arrays:
            raise Invalid("input.missing", f"The graph {graph.name!r} needs {field}.", field=field)
        if name not in wanted:
            raise Invalid("input.unknown", f"The graph {graph.name!r} does not read {field}.", field=field)
        shape, given = list(arrays[name].shape), wanted[name]
        if not given.fits(shape, sizes):
            raise Invalid("input.shape", f"{field} has shape {shape}; the graph takes {given.shape}.", field=field)


def check_policy(graph: Graph) -> None:
    """Raises Invalid unless a graph maps observations to a distribution's outputs and a value."""
    inputs = graph.names("input")
    outputs = {output.name for output in graph.outputs}
    if len(inputs) != 1 or "value" not in outputs or not outputs & {"logits", "mean"}:
        raise Invalid(
            "policy.graph",
            f"The graph {graph.name!r} takes {inputs} and gives {sorted(outputs)}.",
            field="graph",
            fix="A policy takes observations and gives value, and logits or mean and log_std (PPOTrainer sees to it).",
        )
