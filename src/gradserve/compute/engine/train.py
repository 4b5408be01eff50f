"""Rows -> log-probs, loss and gradient, without padding: all rows of a Task are one packed row of N tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from gradserve.compute.engine import losses
from gradserve.compute.engine.attention import PackedLayout
from gradserve.compute.engine.base import Base
from gradserve.compute.engine.lora import Adapter, Route, Routing, Tensors
from gradserve.wire.data import Array, Row, tokens_of
from gradserve.wire.errors import Invalid
from gradserve.wire.losses import LOSSES
from gradserve.wire.results import ForwardBackwardResult

HEAD_POSITIONS = 1024
"""Positions whose logits [positions, V] exist at one time; more are computed in chunks, and again in the backward."""

RECOMPUTE_TOKENS = 1024
"""Above so many packed tokens a backward pass recomputes each layer instead of keeping its activations."""


@dataclass(frozen=True)
class Packed:
    """Rows laid end to end. ``targets`` is int64 [N, K]; ``widths`` is each row's own K, None for a flat [N]."""

    tokens: Tensor
    positions: Tensor
    targets: Tensor
    inputs: dict[str, Tensor]
    lengths: list[int]
    widths: list[int | None]


def pack(rows: list[Row], device: torch.device) -> Packed:
    """Raises Invalid (with the row's index) when an input's shape doesn't fit its row."""
    if not rows:
        raise Invalid("no_rows", "there are no rows", field="data")
    lengths = [row.length for row in rows]
    targets = [_input(row, index, "target_tokens") for index, row in enumerate(rows)]
    width = max(1 if target.ndim == 1 else target.shape[1] for target in targets)
    return Packed(
        tokens=_tensor(np.concatenate([tokens_of(row) for row in rows]), device, torch.int64),
        positions=torch.cat([torch.arange(length, device=device) for length in lengths]),
        targets=_tensor(np.concatenate([_widen(target, width) for target in targets]), device, torch.int64),
        inputs=_pack_inputs(rows, width, device),
        lengths=lengths,
        widths=[None if target.ndim == 1 else target.shape[1] for target in targets],
    )


def _pack_inputs(rows: list[Row], width: int, device: torch.device) -> dict[str, Tensor]:
    """float32 [N, K] by name. An input that only some rows have is a mistake, except weights, which are then ones."""
    names = {name for row in rows for name in row.inputs} - {"target_tokens"}
    packed = {}
    for name in sorted(names):
        columns = []
        for index, row in enumerate(rows):
            if name in row.inputs:
                column = _input(row, index, name)
            elif name == "weights":
                column = np.ones_like(_input(row, index, "target_tokens"), dtype=np.float32)
            else:
                raise Invalid("missing_input", f"some rows have {name!r}, this one does not", index=index)
            columns.append(_widen(column, width))
        packed[name] = _tensor(np.concatenate(columns), device, torch.float32)
    # Cells that only fill up a narrower row must not count: without given weights they would be ones.
    if width > 1 and "weights" not in packed:
        ones = [
            _widen(np.ones_like(_input(r, i, "target_tokens"), dtype=np.float32), width) for i, r in enumerate(rows)
        ]
        packed["weights"] = _tensor(np.concatenate(ones), device, torch.float32)
    return packed


def _input(row: Row, index: int, name: str) -> NDArray[np.generic]:
    if name not in row.inputs:
        raise Invalid("missing_input", f"the loss needs {name!r}", field=name, index=index)
    values = row.inputs[name].numpy()
    if values.ndim not in (1, 2) or values.shape[0] != row.length or row.length == 0:
        raise Invalid(
            "bad_shape", f"{name!r} has shape {values.shape} for {row.length} tokens", field=name, index=index
        )
    return values


def _widen(values: NDArray[np.generic], width: int) -> NDArray[np.generic]:
    """[n] or [n, k] -> [n, width], zeros at the right."""
    columns = values[:, None] if values.ndim == 1 else values
    return np.pad(columns, ((0, 0), (0, width - columns.shape[1])))


def _tensor(values: NDArray[np.generic], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device, dtype)


def forward_backward(
    base: Base, weights: Tensors, rows: list[Row], loss: str, config: dict[str, float], backward: bool
) -> tuple[ForwardBackwardResult, Tensors | None]:
    """The result for the client and, with ``backward``, the gradient under the names of ``weights``.

    Raises Invalid for inputs that do not fit and for a loss or gradient that is not finite.
    """
    packed = pack(rows, base.device)
    if not backward:
        with torch.no_grad():
            return evaluate(base, Adapter.of(weights), packed, loss, config)[1], None
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}
    adapter = Adapter.of(leaves)
    # The routing must hold during the backward pass too: recomputed layers ask for it again.
    with base.routed(_whole(adapter, packed)), base.recomputing(packed.tokens.numel() > RECOMPUTE_TOKENS):
        terms, result = evaluate(base, adapter, packed, loss, config)
        gradients = torch.autograd.grad(terms.sum(), list(leaves.values()), materialize_grads=True)
    gradient = dict(zip(leaves, gradients, strict=True))
    check_gradient(gradient)
    return result, gradient


def evaluate(
    base: Base, adapter: Adapter | None, packed: Packed, loss: str, config: dict[str, float]
) -> tuple[Tensor, ForwardBackwardResult]:
    """The loss's terms, whose sum is what is differentiated, and the result for the client. Raises Invalid."""
    _check_tokens(base, packed)
    batch = _batch(loss, packed, target_logprobs(base, adapter, packed), losses.settings(loss, config))
    terms = losses.FUNCTIONS[loss](batch)
    return terms, _result(loss, packed, batch, terms)


def check_gradient(gradient: Tensors) -> None:
    """Raises Invalid when a number in it is not finite."""
    if not all(bool(tensor.isfinite().all()) for tensor in gradient.values()):
        raise Invalid("non_finite", "the gradient is not finite; nothing was accumulated.", fix=_CURE)


def target_logprobs(base: Base, adapter: Adapter | None, packed: Packed) -> Tensor:
    """Log-probs of the targets, float32 [N, K]; differentiable where the weights' tensors ask for it."""
    with base.routed(_whole(adapter, packed)):
        hidden = base.hidden(packed.tokens, packed.positions, PackedLayout(packed.lengths))

    def head(part: Tensor, targets: Tensor) -> Tensor:
        with base.routed(_all(adapter, part.shape[0])):
            lp: Tensor = _TargetLogprobs.apply(base.logits(part), targets)  # type: ignore[no-untyped-call]
            return lp

    if hidden.shape[0] <= HEAD_POSITIONS:
        return head(hidden, packed.targets)
    chunks = zip(torch.split(hidden, HEAD_POSITIONS), torch.split(packed.targets, HEAD_POSITIONS), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([head(*chunk) for chunk in chunks])
    return torch.cat([checkpoint(head, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks])


class _TargetLogprobs(torch.autograd.Function):
    """log_softmax + gather with one [M, V] temporary in the backward pass instead of three."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, targets: Tensor) -> Tensor:
        """logits [M, V], targets [M, K] -> [M, K]"""
        total = logits.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(logits, total, targets)
        return logits.gather(1, targets) - total

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        """d lp_k / d logits = onehot_k - softmax"""
        logits, total, targets = ctx.saved_tensors  # type: ignore[attr-defined]
        out = torch.sub(logits, total).exp_()
        out.mul_(-grad.sum(1, keepdim=True)).scatter_add_(1, targets, grad)
        return out, None


_CURE = "Look for extreme advantages, weights or log-probs, or lower the learning rate."


def _whole(adapter: Adapter | None, packed: Packed) -> Routing:
    return _all(adapter, packed.tokens.numel())


def _all(adapter: Adapter | None, count: int) -> Routing:
    return [] if adapter is None else [Route(adapter, slice(0, count))]


def _check_tokens(base: Base, packed: Packed) -> None:
    longest = max(packed.lengths)
    if longest > base.context:
        raise Invalid(
            "too_long",
            f"a row has {longest} tokens; the context is {base.context}",
            index=packed.lengths.index(longest),
        )
    for field, ids in (("model_input", packed.tokens), ("target_tokens", packed.targets)):
        if int(ids.min()) < 0 or int(ids.max()) >= base.vocab:
            raise Invalid("unknown_token", f"{field} has ids outside 0..{base.vocab - 1}", field=field)


def _batch(loss: str, packed: Packed, lp: Tensor, config: dict[str, float]) -> losses.Batch:
    """The ratio losses have one target per token and work on [N]."""
    if loss == "cross_entropy":
        return losses.Batch(lp, packed.inputs, config, packed.lengths)
    if lp.shape[1] != 1:
        raise Invalid("bad_shape", f"{loss} takes one target per token", field="target_tokens")
    flat = {name: values[:, 0] for name, values in packed.inputs.items()}
    for name in LOSSES[loss].required:
        if name != "target_tokens" and name not in flat:
            raise Invalid("missing_input", f"the loss {loss} needs {name!r}", field=name, index=0)
    return losses.Batch(lp[:, 0], flat, config, packed.lengths)


def _result(loss: str, packed: Packed, batch: losses.Batch, terms: Tensor) -> ForwardBackwardResult:
    metrics = losses.metrics(loss, batch, terms)
    if not np.isfinite(metrics["loss:sum"]):
        raise Invalid("non_finite", f"the loss is {metrics['loss:sum']}; nothing was accumulated.", fix=_CURE)
    lp = batch.lp.detach().view(packed.tokens.numel(), -1).cpu().numpy()
    parts = np.split(lp, np.cumsum(packed.lengths)[:-1])
    arrays = [
        Array.of(part[:, 0] if width is None else part[:, :width])
        for part, width in zip(parts, packed.widths, strict=True)
    ]
    return ForwardBackwardResult(arrays, metrics)
