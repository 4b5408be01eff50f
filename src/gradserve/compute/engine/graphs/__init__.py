"""Graphs (wire/graph.py) that run: losses and policies of users, as data.

    operators   names -> torch operators, from the allow-list only
    guards      sizes that an operator takes on trust, checked
    python      arithmetic on sizes and numbers, guarded
    executable  a graph, resolved once and run many times, differentiable
    module      a graph as an nn.Module with weights
    cost        shapes, bytes and FLOPs of a graph by a dry run on fake tensors, against limits

Invariant: nothing a graph says is ever looked up outside the allow-list, and nothing it computes is larger than was
measured before.
"""

from gradserve.compute.engine.graphs.cost import Cost, Limits, NodeCost, measure
from gradserve.compute.engine.graphs.executable import Executable
from gradserve.compute.engine.graphs.module import GraphModule, load_module

__all__ = ["Cost", "Executable", "GraphModule", "Limits", "NodeCost", "load_module", "measure"]
