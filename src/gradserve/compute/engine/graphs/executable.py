"""A graph, resolved once and run many times.

Values live in numbered places. Each step takes its operands from them, and gives back the places that nobody needs
afterwards: what autograd does not keep is freed. Running a graph calls the operators that eager code would call, in
the same order, so that values and gradients have the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from gradserve.compute.engine.graphs.operators import resolve
from gradserve.wire.errors import GradserveError, Invalid
from gradserve.wire.graph import Constant, Graph, Input, Value, check_structure, references

Places = list[Any]
Build = Callable[[Places], Any]


@dataclass(frozen=True, slots=True)
class Step:
    """One node: ``call(*args, **kwargs)``; operands are put into copies of ``args`` and ``kwargs`` before."""

    name: str
    op: str
    call: Callable[..., Any]
    args: list[Any]
    refs: tuple[tuple[int, int], ...]
    """(position in args, place) of each argument that is a value."""
    built: tuple[tuple[int, Build], ...]
    """(position in args, builder) of each argument that holds values."""
    kwargs: dict[str, Any]
    built_kwargs: tuple[tuple[str, Build], ...]
    place: int
    frees: tuple[int, ...]

    def operands(self, places: Places) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of this step."""
        args = self.args.copy()
        for position, place in self.refs:
            args[position] = places[place]
        for position, build in self.built:
            args[position] = build(places)
        if not self.built_kwargs:
            return args, self.kwargs
        return args, self.kwargs | {key: build(places) for key, build in self.built_kwargs}

    def take(self) -> Callable[[Places], Sequence[Any]] | None:
        """What picks the arguments, all at once, where they are nothing but values; else None.

        A policy is run hundreds of times on little data: what Python does between two operators counts.
        """
        if len(self.refs) != len(self.args) or not self.args or self.kwargs or self.built_kwargs:
            return None
        first, *others = [place for _, place in self.refs]
        return itemgetter(first, *others) if others else itemgetter(slice(first, first + 1))


class Executable:
    """A graph that can be run on ``device``. Making one checks the graph's structure and resolves its operators."""

    def __init__(
        self, graph: Graph, *, device: torch.device | str = "cpu", max_constant_bytes: int | None = None
    ) -> None:
        if max_constant_bytes is None:
            check_structure(graph)
        else:
            check_structure(graph, max_constant_bytes=max_constant_bytes)
        self.graph = graph
        self.device = torch.device(device)
        names = [part.name for parts in (graph.inputs, graph.constants, graph.nodes) for part in parts]
        self._place = {name: place for place, name in enumerate(names)}
        self.constants = [constant_tensor(constant, self.device) for constant in graph.constants]
        self._inputs = [(given, _dtype_or_any(given.dtype), tuple(given.shape)) for given in graph.inputs]
        self.steps = self._steps()
        self._program = [(step, _direct(step.call), step.take(), step.place, step.frees) for step in self.steps]
        self._outputs = [(output.name, self._place[output.value["ref"]]) for output in graph.outputs]

    def run(self, values: dict[str, Tensor], deadline: float | None = None) -> dict[str, Tensor]:
        """The graph's outputs by name, differentiable with respect to ``values`` (one per input, of its dtype/shape).

        ``deadline`` is a time.monotonic() after which no further node is begun. Raises Invalid: graph_input for wrong
        values, graph_node where an operator fails, graph_time past the deadline.
        """
        places = self.begin(values)
        for step, call, take, place, frees in self._program:
            if deadline is not None and time.monotonic() > deadline:
                raise Invalid("graph_time", f"graph {self.graph.name!r} took too long; it stopped at {step.name!r}.")
            try:
                if take is not None:
                    places[place] = call(*take(places))
                else:
                    args, kwargs = step.operands(places)
                    places[place] = call(*args, **kwargs)
            except GradserveError:
                raise
            except (RuntimeError, TypeError, ValueError, IndexError, ArithmeticError, NotImplementedError) as error:
                raise failed(step, error) from error
            for unneeded in frees:
                places[unneeded] = None
        return self.finish(places)

    def begin(self, values: dict[str, Tensor], constants: Sequence[Tensor] | None = None) -> Places:
        """Places with the inputs in them, and the constants or what stands for them. Raises Invalid (graph_input)."""
        places: Places = []
        sizes: dict[str, int] = {}
        for given, dtype, shape in self._inputs:
            value = values.get(given.name)
            if value is None:
                raise Invalid("graph_input", f"graph {self.graph.name!r} needs the input {given.name!r}.")
            fits = value.shape == shape and value.dtype is dtype  # most are weights: nothing more to look at
            places.append(value if fits else checked(given, value, sizes))
        places += self.constants if constants is None else constants
        places += [None] * (len(self._place) - len(places))
        return places

    def finish(self, places: Places) -> dict[str, Tensor]:
        """The outputs, by name; a number becomes a tensor. Raises Invalid (graph_output) if one is neither."""
        return {name: self._output(name, places[place]) for name, place in self._outputs}

    def _output(self, name: str, value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return value
        if isinstance(value, (bool, int, float)):
            return torch.tensor(float(value), device=self.device)
        kind = type(value).__name__
        raise Invalid("graph_output", f"output {name!r} of graph {self.graph.name!r} is a {kind}, no tensor.")

    def _steps(self) -> list[Step]:
        last: dict[str, int] = {}
        for i, node in enumerate(self.graph.nodes):
            for name in references([node.args, list(node.kwargs.values())]):
                last[name] = i
            last.setdefault(node.name, i)
        kept = {output.value["ref"] for output in self.graph.outputs}
        frees: list[list[int]] = [[] for _ in self.graph.nodes]
        for name, i in last.items():
            if name not in kept:
                frees[i].append(self._place[name])
        return [self._step(i, tuple(frees[i])) for i in range(len(self.graph.nodes))]

    def _step(self, index: int, frees: tuple[int, ...]) -> Step:
        node = self.graph.nodes[index]
        args: list[Any] = []
        refs, built = [], []
        for position, value in enumerate(node.args):
            if isinstance(value, dict) and "ref" in value:
                refs.append((position, self._place[value["ref"]]))
                args.append(None)
            elif references(value):
                built.append((position, self._builder(value)))
                args.append(None)
            else:
                args.append(self._plain(value))
        kwargs = {key: self._plain(value) for key, value in node.kwargs.items() if not references(value)}
        built_kwargs = [(key, self._builder(value)) for key, value in node.kwargs.items() if references(value)]
        try:
            call = resolve(node.op)
        except Invalid as refused:
            raise Invalid(refused.code, f"node {node.name[:64]!r}: {refused.detail}", fix=refused.fix) from None
        return Step(
            node.name, node.op, call, args, tuple(refs), tuple(built), kwargs, tuple(built_kwargs),
            self._place[node.name], frees,
        )  # fmt: skip

    def _plain(self, value: Value) -> Any:
        """A value without references, as torch takes it."""
        return self._builder(value)([])

    def _builder(self, value: Value) -> Build:
        """What makes the argument, given the places."""
        if isinstance(value, list):
            items = [self._builder(item) for item in value]
            return lambda places: [item(places) for item in items]
        if not isinstance(value, dict):
            return lambda places: value
        ((tag, content),) = value.items()
        if tag == "ref":
            place = self._place[content]
            return lambda places: places[place]
        if tag in ("tuple", "slice"):
            parts = [self._builder(item) for item in content]
            make: Callable[..., Any] = slice if tag == "slice" else lambda *items: items
            return lambda places: make(*[part(places) for part in parts])
        plain = self._tagged(tag, content)
        return lambda places: plain

    def _tagged(self, tag: str, content: Any) -> Any:
        match tag:
            case "dtype":
                return dtype_of(content)
            case "float":
                return float(content)
            case "device":
                return self.device
            case "memory_format":
                return getattr(torch, content)
            case _:
                return Ellipsis


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a name that the graph's format allows."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _direct(call: Callable[..., Any]) -> Callable[..., Any]:
    """An operator without the frame of Python that torch puts around it."""
    return call._op if isinstance(call, OpOverload) else call


def _dtype_or_any(name: str) -> torch.dtype | None:
    return None if name == "any" else dtype_of(name)


def constant_tensor(constant: Constant, device: torch.device) -> Tensor:
    """The tensor that a constant's bytes hold."""
    dtype = dtype_of(constant.dtype)
    if not constant.data:
        return torch.empty(constant.shape, dtype=dtype, device=device)
    return torch.frombuffer(bytearray(constant.data), dtype=dtype).reshape(constant.shape).to(device)


def checked(given: Input, value: Tensor, sizes: dict[str, int]) -> Tensor:
    """``value``, if it is what ``given`` declares; ``sizes`` remembers what each symbol stood for."""
    fits = given.dtype == "any" or value.dtype == dtype_of(given.dtype)
    if not (fits and given.fits(value.shape, sizes)):
        known = {symbol: size for symbol, size in sizes.items() if symbol in given.shape}
        raise Invalid(
            "graph_input",
            f"input {given.name!r} must be {given.dtype}{given.shape} with {known}; "
            f"it is {str(value.dtype).removeprefix('torch.')}{list(value.shape)}.",
        )
    return value


def failed(step: Step, error: Exception) -> Invalid:
    """What an operator's error says to the user."""
    first = str(error).strip().split("\n")[0][:300]
    return Invalid("graph_node", f"node {step.name!r} ({step.op}) failed: {first or type(error).__name__}")
