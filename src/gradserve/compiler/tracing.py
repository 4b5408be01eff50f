"""torch.export, watched: what a graph can't hold is refused at the line where the user wrote it.

Without the watch some programs would be exported as if all were well (a branch on the size of a batch), and others
refused in words about symbols.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram, export
from torch.overrides import TorchFunctionMode

from gradserve.compiler import refusals
from gradserve.compiler.refusals import CaptureError, Place, Refusal

_REFUSALS = {
    "__bool__": refusals.BRANCH,
    "item tolist __float__ __int__ __index__ __complex__": refusals.VALUE,
    "numpy __array__ __dlpack__": refusals.NUMPY,
    "__setitem__": refusals.ASSIGN,
    "masked_select nonzero argwhere unique bincount": refusals.DATA_DEPENDENT,
    "rand randn randint randperm rand_like randn_like randint_like bernoulli bernoulli_ multinomial normal normal_ "
    "uniform_ exponential_ poisson rrelu gumbel_softmax": refusals.RANDOM,
}
_REFUSED: dict[str, Refusal] = {name: refusal for names, refusal in _REFUSALS.items() for name in names.split()}
_DROPOUTS = frozenset({"dropout", "dropout_", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"})


class Watch(TorchFunctionMode):
    """Sees every call of a torch function, with the user's stack below it."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, Place | None] = {}
        """Where each torch function was first called, by its name."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        self.places.setdefault(name, refusals.place_of_call())
        refusal = refusals.CLOSURE if _holds_foreign_leaf(args) else _refusal(name, args, kwargs or {})
        if refusal is not None:
            raise refusal.at(refusals.place_of_call())
        return func(*args, **(kwargs or {}))


def _holds_foreign_leaf(values: Sequence[Any]) -> bool:
    """Whether a real tensor that requires a gradient is among the operands: all that is given is fake by now."""
    return any(
        _holds_foreign_leaf(value)
        if isinstance(value, (list, tuple))
        else isinstance(value, Tensor) and not isinstance(value, FakeTensor) and value.requires_grad
        for value in values
    )


def _refusal(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Refusal | None:
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        masks = [part for part in index if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)]
        return refusals.MASK_INDEX if masks else None
    if name in ("unbind", "__len__"):  # for row in x calls unbind
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        return None if isinstance(args[0].shape[dim], int) else refusals.SIZE_LOOP
    if name == "where" and len(args) + len(kwargs) == 1:
        return refusals.DATA_DEPENDENT
    if name in _DROPOUTS:
        probability = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
        return refusals.RANDOM if training and probability > 0 else None
    if name == "scaled_dot_product_attention":
        return refusals.RANDOM if kwargs.get("dropout_p", 0.0) > 0 else None
    return _REFUSED.get(name)


_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def _watched_sizes() -> Iterator[None]:
    """Refuses a Python number or a decision that is made of a symbolic size in the user's own code.

    torch.export takes such a decision as made for good and says nothing. An equality that holds (an assertion on
    shapes) is let through: the graph can only be run where it holds.
    """

    def number(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def watched(size: Any) -> Any:
            if size.node.maybe_as_int() is None and refusals.is_users(sys._getframe(1)):
                raise refusals.SIZE_LOOP.at(refusals.place_of_call())
            return method(size)

        return watched

    def truth(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def watched(fact: Any) -> Any:
            if not refusals.is_users(sys._getframe(1)) or torch.fx.experimental.symbolic_shapes.is_concrete_bool(fact):
                return method(fact)
            equality = type(fact.node.expr).__name__
            answer = method(fact)
            if not (equality == "Equality" and answer) and not (equality == "Unequality" and not answer):
                raise refusals.SIZE_BRANCH.at(refusals.place_of_call())
            return answer

        return watched

    patches = [(torch.SymBool, "__bool__", truth)] + [
        (torch.SymInt, name, number) for name in ("__int__", "__index__", "__float__")
    ]
    with _one_at_a_time, contextlib.ExitStack() as undo:
        for owner, name, watch in patches:
            method = getattr(owner, name, None)
            if method is not None:
                undo.callback(setattr, owner, name, method)
                setattr(owner, name, watch(method))
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch.export prints graphs and hints about itself on errors; ours says what there is to say."""
    loggers = [logging.getLogger(name) for name in ("torch.fx.experimental.symbolic_shapes", "torch.export")]
    levels = [logger.level for logger in loggers]
    validation = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)  # it branches on values
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(validation)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class _Watched(torch.nn.Module):
    """Runs ``body`` on one batch under a watch; ``module`` is a child, so that its parameters are lifted."""

    def __init__(
        self, body: Callable[[Any], dict[str, Any]], module: torch.nn.Module | None, watch: Watch, names: list[str]
    ) -> None:
        super().__init__()
        self.body = body
        self.watch = watch
        self.module = module
        self.names = names

    def forward(self, batch: Any) -> Any:
        with self.watch:
            found = self.body(batch)
        self.names[:] = found  # torch.export undoes what is assigned to self, not what becomes of a list
        return list(found.values())


OWNER = "module."
"""What torch.export puts before the names of the module's parameters and buffers."""


class Traced:
    """An exported program with the names of its outputs and where each torch function was called."""

    def __init__(self, program: ExportedProgram, outputs: list[str], places: dict[str, Place | None]) -> None:
        self.program = program
        self.outputs = outputs
        self.places = places

    def tensor(self, target: str) -> Tensor:
        """A constant, parameter or buffer by torch.export's name for it."""
        found = self.program.constants.get(target)
        return found if isinstance(found, Tensor) else self.program.state_dict[target]


def trace(
    body: Callable[[Any], dict[str, Any]],
    batch: Any,
    dynamic: Any,
    *,
    module: torch.nn.Module | None = None,
    user: Callable[..., Any],
) -> Traced:
    """Export ``body(batch)``, a dict of named outputs. ``dynamic`` marks sizes that differ, as dynamic_shapes of
    torch.export; ``user`` is whose place is named when nothing better is known. Raises CaptureError."""
    watch = Watch()
    names: list[str] = []
    watched = _Watched(body, module, watch, names)
    try:
        with _quiet(), _watched_sizes():
            program = export(watched, (batch,), dynamic_shapes={"batch": dynamic}, strict=False)
    except Exception as error:
        raise _explained(error, user) from _plain(error)
    return Traced(program, names, watch.places)


def _plain(error: Exception) -> Exception | None:
    return None if isinstance(error, CaptureError) else error


def _explained(error: BaseException, user: Callable[..., Any]) -> CaptureError:
    """The error in words about the user's code."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, CaptureError):
            return CaptureError(cause.reason, cause.cure, cause.place)
        cause = cause.__cause__ or cause.__context__
    place = refusals.place_of_error(error.__traceback__) or refusals.place_of_function(user)
    text = str(error)
    kind = type(error).__name__
    if "Constraints violated" in text or "specialized" in text:
        return refusals.SIZE_FIXED.at(place)
    if kind in ("GuardOnDataDependentSymNode", "DataDependentOutputException"):
        return refusals.BRANCH.at(place)
    if kind == "DynamicOutputShapeException":
        return refusals.DATA_DEPENDENT.at(place)
    if "leaf Variable" in text:
        return refusals.IN_PLACE.at(place)
    first_line = text.strip().split("\n")[0][:500]
    return CaptureError(f"{kind}: {first_line}", place=place)
