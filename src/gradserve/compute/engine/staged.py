"""A loss over a whole request whose rows are computed in parts: scores of all parts, the loss, its cotangents back."""

from __future__ import annotations

from itertools import accumulate

import torch

from gradserve.compute.engine.graph_store import BoundedGraph
from gradserve.compute.engine.lora import Tensors
from gradserve.compute.engine.objectives import GraphLoss
from gradserve.compute.engine.packing import bare, pack
from gradserve.compute.engine.scores import Scores
from gradserve.wire.data import Row


def cotangents(
    graph: BoundedGraph, rows: list[Row], parts: list[Tensors], part_rows: tuple[int, ...]
) -> tuple[list[Tensors], dict[str, float]]:
    """The loss's derivative with respect to the scores of each part, and its metrics. Raises Invalid.

    ``parts`` are Scores.named() of consecutive rows; ``part_rows`` their numbers of rows, which add up to ``rows``.
    """
    device = parts[0]["logprobs"].device
    leaves = {name: torch.cat([part[name] for part in parts]).requires_grad_() for name in parts[0]}
    total, metrics = GraphLoss(graph, rows, device)(pack(bare(rows), device), Scores(**leaves))
    found = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    ends = list(accumulate(part_rows))
    counts = [sum(row.length for row in rows[end - size : end]) for end, size in zip(ends, part_rows, strict=True)]
    split = {name: torch.split(tensor, counts) for name, tensor in zip(leaves, found, strict=True)}
    return [{name: pieces[index] for name, pieces in split.items()} for index in range(len(parts))], metrics


def numbered(parts: list[Tensors]) -> Tensors:
    """The cotangents of all parts as the tensors of one object."""
    return {f"{index}.{name}": tensor for index, part in enumerate(parts) for name, tensor in part.items()}


def of_part(tensors: Tensors, index: int) -> Tensors:
    """Those of one part."""
    prefix = f"{index}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
