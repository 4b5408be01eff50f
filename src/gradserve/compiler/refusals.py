"""What is said to a user whose function can't become a graph: where, why, and what to write instead."""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any


class CaptureError(ValueError):
    """A function or module can't be written as a graph.

    ``reason`` says why, ``cure`` what is usually written instead, ``file`` and ``line`` where the user's code is
    (None where it isn't known).
    """

    def __init__(self, reason: str, cure: str | None = None, place: Place | None = None) -> None:
        self.reason = reason
        self.cure = cure
        self.place = place
        super().__init__(" ".join(part for part in (place and f"{place}:", reason, cure) if part))

    @property
    def file(self) -> str | None:
        """The user's file."""
        return self.place.file if self.place else None

    @property
    def line(self) -> int | None:
        """The line in it, from 1."""
        return self.place.line if self.place else None


@dataclass(frozen=True)
class Place:
    """A line of the user's code."""

    file: str
    line: int

    def __str__(self) -> str:
        source = linecache.getline(self.file, self.line).strip()
        return f"{self.file}:{self.line}" + (f" `{source}`" if source else "")


@dataclass(frozen=True)
class Refusal:
    """A reason and its cure."""

    reason: str
    cure: str

    def at(self, place: Place | None) -> CaptureError:
        """The error that says so of ``place``."""
        return CaptureError(self.reason, self.cure, place)


BRANCH = Refusal(
    "Python's if, while, and, or and assert need a tensor's value, which a graph does not have while it is made.",
    "Write torch.where(condition, a, b), or multiply by a mask.",
)
VALUE = Refusal(
    "This takes a Python number out of a tensor, which a graph does not have while it is made.",
    "Keep it a tensor: return tensors (metrics too) instead of calling .item(), float(), int() or .tolist().",
)
NUMPY = Refusal(
    "NumPy can't be part of a graph: its results do not depend on the weights as far as torch can see.",
    "Use the torch function of the same name, e.g. torch.exp for np.exp.",
)
MASK_INDEX = Refusal(
    "Indexing by a boolean mask gives a tensor whose size depends on values.",
    "Write (x * mask).sum() instead of x[mask].sum(), and (x * mask).sum() / mask.sum() instead of x[mask].mean().",
)
DATA_DEPENDENT = Refusal(
    "The size of this result depends on the values of tensors.",
    "Use operations that keep the size: masks, torch.where, sorting.",
)
ASSIGN = Refusal(
    "This writes into a part of a tensor.",
    "Write x = torch.where(mask, value, x), x.masked_fill(mask, value), or build the parts and torch.cat them.",
)
IN_PLACE = Refusal(
    "This changes a tensor that is used under another name, or that was given as an input.",
    "Write x = x + y instead of x += y or x.add_(y).",
)
RANDOM = Refusal(
    "Random numbers can't be part of a graph: a replay would give other ones.",
    "Draw them on the client and send them as an input, or leave them out (dropout: p=0 or module.eval()).",
)
SIZE_LOOP = Refusal(
    "This makes a Python number of the size of a batch or of a row, which differs from request to request.",
    "Use an operation on the whole tensor (sum, cumsum, flip) instead of a loop; x.shape[i] instead of len(x), "
    "T ** 0.5 instead of math.sqrt(T).",
)
SIZE_BRANCH = Refusal(
    "This decides by the size of a batch or of a row, which differs from request to request.",
    "Write one form that is right for all sizes (masks, clamp(min=1)).",
)
SIZE_FIXED = Refusal(
    "This works for one size of the batch or of the rows only, but sizes differ from request to request.",
    "Use -1 or x.shape[i] for sizes; an input of fixed size is declared, e.g. inputs={'x': 'float32[token, 5]'}; "
    "of a module's input, dimension 0 is the batch unless batch_dims names another.",
)
BUFFER = Refusal(
    "The module changes its own buffers in the forward pass, as BatchNorm does in train mode.",
    "Call module.eval() first, or use LayerNorm or GroupNorm.",
)
SPARSE = Refusal("This asks for sparse gradients.", "Make the Embedding without sparse=True.")
CLOSURE = Refusal(
    "This uses a tensor that requires a gradient but is no input: its gradient would be lost.",
    "Detach it, pass it as an input, or capture the module that owns it (capture_program).",
)
CONTROL = Refusal(
    "This calls a function that takes functions (cond, map, scan, autocast), which a graph can't hold.",
    "Use torch.where and operations on whole tensors.",
)


@cache
def _library_folders() -> tuple[str, ...]:
    """Folders whose frames are nobody's own code: torch's, this package's, importlib's."""
    torch = find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    return (
        str(Path(torch.origin).parent) + "/",
        str(Path(__file__).parent) + "/",
        "<frozen",
        "<eval_with_key",
        "<string>",
    )


def is_users(frame: FrameType) -> bool:
    """Whether a frame runs code that is neither torch's nor ours."""
    return not frame.f_code.co_filename.startswith(_library_folders())


def place_of_call() -> Place | None:
    """The innermost line of the user's own code that led here."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame):
        frame = frame.f_back
    return None if frame is None else Place(frame.f_code.co_filename, frame.f_lineno)


def place_of_error(trace: TracebackType | None) -> Place | None:
    """The innermost line of the user's own code that an exception went through."""
    place = None
    while trace is not None:
        if is_users(trace.tb_frame):
            place = Place(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return place


def place_of_function(function: Callable[..., Any]) -> Place | None:
    """Where a function was defined, if the user wrote it."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or code.co_filename.startswith(_library_folders()):
        return None
    return Place(code.co_filename, code.co_firstlineno)
