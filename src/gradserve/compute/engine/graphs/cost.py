"""What running a graph takes, found by a dry run on fake tensors: shapes without memory, operators without arithmetic.

The dry run goes forward and, where there is a loss, backward. It is what refuses a graph that would not run, whose
result sizes depend on values, or that would take too much; it stops itself when it takes long.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from gradserve.compute.engine.graphs.executable import Executable, Step, dtype_of, failed
from gradserve.wire.errors import GradserveError, Invalid
from gradserve.wire.graph import MAX_VALUES, Graph, Input

# torch logs a traceback of every operator that refuses its arguments; here the user is told.
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)

DEFAULT_DTYPE: Final = torch.float32
"""Assumed for inputs of dtype ``any``."""


@dataclass(frozen=True)
class Limits:
    """The most that one run of a graph may take. ``seconds`` is for the dry run itself."""

    node_bytes: int = 512 << 20
    peak_bytes: int = 2 << 30
    flops: int = 10**12
    seconds: float = 10.0


@dataclass(frozen=True)
class NodeCost:
    """One node: the shape of its (first) result, the bytes of new memory it takes, its floating-point operations."""

    name: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    flops: int


@dataclass(frozen=True)
class Cost:
    """``bytes`` and ``flops`` are sums over the nodes, ``backward_*`` those of the gradient of the loss.

    ``peak_bytes`` is the most memory that is held at once, inputs not counted, what autograd keeps included.
    """

    nodes: list[NodeCost]
    outputs: dict[str, tuple[int, ...]]
    bytes: int
    flops: int
    backward_bytes: int
    backward_flops: int
    peak_bytes: int


def measure(graph: Graph | Executable, sizes: dict[str, int], limits: Limits | None = None) -> Cost:
    """The cost of one run with the given sizes of symbols. Raises Invalid (graph_*) if it can't run or takes too much.

    A Graph is checked and resolved first; pass an Executable to save that.
    """
    limits = limits or Limits()
    executable = graph if isinstance(graph, Executable) else Executable(graph)
    with FakeTensorMode() as fake:
        values = {given.name: _fake_input(given, sizes) for given in executable.graph.inputs}
        constants = [fake.from_tensor(constant) for constant in executable.constants]
    with fake, _Meter(limits, [*values.values(), *constants]) as meter:
        places = executable.begin(values, constants)
        nodes = [_dry_step(step, places, meter) for step in executable.steps]
        outputs = executable.finish(places)
        forward = meter.total
        if "loss" in outputs:
            _dry_backward(outputs["loss"], values, meter)
        shapes = {name: tuple(value.shape) for name, value in outputs.items()}
    backward = meter.total
    return Cost(
        nodes,
        shapes,
        bytes=forward.bytes,
        flops=forward.flops,
        backward_bytes=backward.bytes - forward.bytes,
        backward_flops=backward.flops - forward.flops,
        peak_bytes=meter.peak_bytes,
    )


@dataclass(frozen=True)
class _Total:
    bytes: int = 0
    flops: int = 0


class _Meter(TorchDispatchMode):
    """Counts what every operator below the graph's own takes, and stops the run when a limit is passed."""

    def __init__(self, limits: Limits, given: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limits = limits
        self.total = _Total()
        self.held_bytes = 0
        self.peak_bytes = 0
        self._deadline = time.monotonic() + limits.seconds
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet(tensor.untyped_storage() for tensor in given)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = list(_tensors(result))
        if not made or func is torch.ops.aten.detach.default:
            # Questions about a tensor, and autograd's detach, come from where a C++ exception would end the process.
            return result
        if time.monotonic() > self._deadline:
            raise Invalid("graph_time", f"the graph's dry run takes more than {self.limits.seconds} s.")
        for tensor in made:
            self._check_size(func, tensor)
        new_bytes = sum(self._hold(tensor) for tensor in made)
        flops = _flops(func, args, kwargs or {}, result, new_bytes)
        self.total = _Total(self.total.bytes + new_bytes, self.total.flops + flops)
        self._check_total()
        return result

    def _check_size(self, func: OpOverload, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if size > self.limits.node_bytes:
            raise Invalid(
                "graph_too_large",
                f"{func} makes a tensor {list(tensor.shape)} of {size} bytes; at most {self.limits.node_bytes} are "
                "allowed.",
            )

    def _hold(self, tensor: Tensor) -> int:
        """Count a result's memory if it is new, until it is freed. Returns its bytes, 0 for a view."""
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return 0
        self._seen.add(storage)
        size = storage.nbytes()
        self.held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        weakref.finalize(storage, self._free, size)
        return size

    def _free(self, size: int) -> None:
        self.held_bytes -= size

    def _check_total(self) -> None:
        for what, value, most in (
            ("bytes at once", self.peak_bytes, self.limits.peak_bytes),
            ("floating-point operations", self.total.flops, self.limits.flops),
        ):
            if value > most:
                raise Invalid("graph_too_large", f"the graph takes more than {most} {what}.", fix="Send fewer rows.")


def _fake_input(given: Input, sizes: dict[str, int]) -> Tensor:
    missing = [size for size in given.shape if isinstance(size, str) and size not in sizes]
    if missing:
        raise Invalid("graph_shape", f"the size {missing[0]!r} of input {given.name!r} is not known.")
    shape = [sizes[size] if isinstance(size, str) else size for size in given.shape]
    dtype = DEFAULT_DTYPE if given.dtype == "any" else dtype_of(given.dtype)
    trains = given.kind != "buffer" and dtype.is_floating_point
    return torch.empty(shape, dtype=dtype, requires_grad=trains)


def _dry_step(step: Step, places: list[Any], meter: _Meter) -> NodeCost:
    before = meter.total
    args, kwargs = step.operands(places)
    _check_pieces(step, args, kwargs)
    result = _guarded(step, lambda: step.call(*args, **kwargs))
    places[step.place] = result
    for place in step.frees:
        places[place] = None
    first = next(iter(_tensors(result)), None)
    return NodeCost(
        step.name,
        step.op,
        () if first is None else tuple(first.shape),
        type(result).__name__ if first is None else str(first.dtype).removeprefix("torch."),
        meter.total.bytes - before.bytes,
        meter.total.flops - before.flops,
    )


def _guarded(step: Step, run: Callable[[], Any]) -> Any:
    """Run a step; whatever goes wrong is the graph's fault and said of its node.

    Any exception: shape functions written in Python fail on nonsense arguments in every way there is.
    """
    try:
        return run()
    except GradserveError as error:
        raise Invalid(error.code, f"node {step.name!r} ({step.op}): {error.detail}", fix=error.fix) from None
    except Exception as error:
        if type(error).__name__ in _DATA_DEPENDENT:
            raise Invalid(
                "graph_data_dependent",
                f"node {step.name!r} ({step.op}): the size of its result, or a decision, depends on values.",
                fix="Write (x * mask).sum() instead of x[mask].sum(), torch.where instead of if.",
            ) from error
        raise failed(step, error) from error


_DATA_DEPENDENT = frozenset(
    {"DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode"}
)


def _dry_backward(loss: Tensor, values: dict[str, Tensor], meter: _Meter) -> None:
    """The gradient of the loss with respect to every input that can have one."""
    if loss.ndim or not loss.dtype.is_floating_point:
        shown = f"{loss.dtype}{list(loss.shape)}".removeprefix("torch.")
        raise Invalid("graph_output", f"the loss must be a scalar of a floating dtype; it is {shown}.")
    leaves = [value for value in values.values() if value.requires_grad]
    if not loss.requires_grad or not leaves:
        return
    try:
        torch.autograd.grad(loss, leaves, allow_unused=True)
    except GradserveError:
        raise
    except Exception as error:  # as in _guarded
        first = str(error).strip().split("\n")[0][:300]
        raise Invalid("graph_gradient", f"the loss has no gradient: {first}") from error


_PIECES = frozenset({"split", "split_with_sizes", "unsafe_split", "chunk", "unsafe_chunk", "tensor_split", "unbind"})


def _check_pieces(step: Step, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Bound how many pieces a tensor is cut into, before torch makes a list of them."""
    name = step.op.split(".")[1]
    if name not in _PIECES or not args or not isinstance(args[0], Tensor):
        return
    numbers = [abs(value) for value in [*args[1:], *kwargs.values()] if isinstance(value, int)]
    longest = max(args[0].shape, default=0)
    if name == "unbind":
        pieces = longest
    elif name in ("split", "unsafe_split"):
        pieces = longest // max(numbers[0] if numbers else 1, 1)
    else:
        pieces = max(numbers, default=0)
    if pieces > MAX_VALUES:
        raise Invalid(
            "graph_too_large", f"node {step.name!r} ({step.op}) makes more than {MAX_VALUES} pieces of a tensor."
        )


def _flops(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, new_bytes: int) -> int:
    """By torch's formulas for products, convolutions and attention; else one per item read or made, none for views."""
    formula = flop_registry.get(func.overloadpacket)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result))
    if func.overloadpacket in (torch.ops.aten.mkldnn_rnn_layer, torch.ops.aten.mkldnn_rnn_layer_backward):
        return _recurrent_flops(func, args)
    if new_bytes == 0:
        return 0
    return max(sum(map(_items, _tensors(args))), sum(map(_items, _tensors(result))))


def _recurrent_flops(func: OpOverload, args: tuple[Tensor, ...]) -> int:
    """Two per weight and step of every row: input and recurrent products. Their gradient takes twice as many."""
    steps = args[0].shape[0] * args[0].shape[1]
    times = 2 if func.overloadpacket is torch.ops.aten.mkldnn_rnn_layer_backward else 1
    return times * 2 * steps * sum(map(_items, args[1:3]))


def _items(tensor: Tensor) -> int:
    return math.prod(tensor.shape)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
