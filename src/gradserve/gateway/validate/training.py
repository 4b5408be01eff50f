"""Checks of a training request: every row, every input, every value, with numpy over all rows at once.

Inputs are joined across rows and looked at in one pass; only when something is wrong is the row searched for.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from gradserve.compute.catalog import BaseFacts
from gradserve.wire.codec import TrainingRequest
from gradserve.wire.data import Array, Row
from gradserve.wire.errors import Invalid
from gradserve.wire.losses import IGNORED_INPUTS, LOSSES, LossSpec
from gradserve.wire.ops import ForwardBackward

TARGETS = "target_tokens"


def training_body(request: TrainingRequest, facts: BaseFacts, max_dense_bytes: int) -> ForwardBackward:
    """The Op of a request with a public loss. Raises Invalid or Unsupported naming ``data[i]`` and the field."""
    spec = _loss(request.loss)
    config = _config(spec, request.config)
    if not request.message.data:
        raise Invalid("data.empty", "data has no rows.", field="data", fix="Send at least one.")
    rows = [_only_known(spec, i, row) for i, row in enumerate(request.rows(max_dense_bytes))]
    check_tokens(rows, facts)
    for name in (*spec.required, *spec.optional):
        _check_shapes(name, spec, rows, facts)
        _check_values(name, rows, facts)
    return ForwardBackward(rows, spec.name, config, backward=not request.forward_only)


def _loss(name: str) -> LossSpec:
    spec = LOSSES.get(name)
    if spec is not None:
        return spec
    raise Invalid(
        "loss.unknown",
        f"loss_fn is {name[:100]!r}.",
        field="loss_fn",
        fix=f"Known losses: {', '.join(LOSSES)}; gradserve.loss(fn) makes one of a Python function.",
    )


def _config(spec: LossSpec, given: dict[str, float | str]) -> dict[str, float]:
    """The loss's settings with defaults filled in, so that the journal says what was computed."""
    config = dict(spec.config)
    for key, value in given.items():
        field = f"loss_fn_config.{key}"
        if key not in config:
            known = ", ".join(spec.config) or "none"
            raise Invalid(
                "config.unknown",
                f"{spec.name} has no setting {key!r}.",
                field=field,
                fix=f"Its settings: {known}.",
            )
        if isinstance(value, str) or not math.isfinite(value):
            raise Invalid("config.number", f"{field} is {value!r}, not a finite number.", field=field)
        config[key] = value
    if config.get("clip_low_threshold", 0.0) > config.get("clip_high_threshold", math.inf):
        raise Invalid(
            "config.range",
            "clip_low_threshold is above clip_high_threshold.",
            field="loss_fn_config.clip_low_threshold",
            fix="Both are ratios, such as 0.8 and 1.2, not distances from 1.",
        )
    return config


def where(index: int, name: str) -> str:
    """How an input of a row is named to the client."""
    return f"data[{index}].loss_fn_inputs.{name}"


def _only_known(spec: LossSpec, index: int, row: Row) -> Row:
    """The row without inputs that clients attach for themselves."""
    for name in spec.required:
        if name not in row.inputs:
            raise Invalid(
                "input.missing",
                f"{spec.name} needs {where(index, name)}.",
                field=where(index, name),
                index=index,
            )
    allowed = {*spec.required, *spec.optional}
    unknown = row.inputs.keys() - allowed - IGNORED_INPUTS
    if unknown:
        name = min(unknown)
        raise Invalid(
            "input.unknown",
            f"{spec.name} does not take {where(index, name)}.",
            field=where(index, name),
            index=index,
            fix=f"It takes {', '.join((*spec.required, *spec.optional))}.",
        )
    if row.inputs.keys() <= allowed:
        return row
    return Row(row.tokens, {name: array for name, array in row.inputs.items() if name in allowed})


def check_targets(rows: list[Row], facts: BaseFacts, wide: bool) -> None:
    """Raises Invalid unless every row has as many targets as tokens, all in the vocabulary; ``wide`` allows [N, K]."""
    spec = LossSpec("this loss", (TARGETS,), wide=wide)
    _check_shapes(TARGETS, spec, rows, facts)
    _check_values(TARGETS, rows, facts)


def check_tokens(rows: list[Row], facts: BaseFacts) -> None:
    """Raises Invalid for an empty row, one that is longer than the context, and ids outside the vocabulary."""
    for index, row in enumerate(rows):
        where = f"data[{index}].model_input"
        if row.length == 0:
            raise Invalid("data.empty_row", f"{where} has no tokens.", field=where, index=index)
        if row.length > facts.context:
            raise Invalid(
                "data.too_long",
                f"{where} has {row.length} tokens; the context of {facts.name} is {facts.context}.",
                field=where,
                index=index,
            )
    tokens = np.frombuffer(b"".join(row.tokens for row in rows), "<i4")
    if tokens.min() < 0 or tokens.max() >= facts.vocab_size:
        index, value = _locate((tokens < 0) | (tokens >= facts.vocab_size), tokens, [r.length for r in rows])
        _out_of_vocabulary(index, f"data[{index}].model_input", value, facts)


def _check_shapes(name: str, spec: LossSpec, rows: list[Row], facts: BaseFacts) -> None:
    """[N], or where the loss allows it [N, K]; all inputs of a row alike."""
    for index, row in enumerate(rows):
        array = row.inputs.get(name)
        if array is None:
            continue
        shape, n = array.shape, row.length
        wide = spec.wide and len(shape) == 2 and shape[0] == n and 1 <= shape[1] <= facts.vocab_size
        if shape != (n,) and not wide:
            allowed = f"[{n}] or [{n}, K]" if spec.wide else f"[{n}]"
            raise Invalid(
                "input.shape",
                f"{where(index, name)} has shape {list(shape)}; the row has {n} tokens, so it must be {allowed}.",
                field=where(index, name),
                index=index,
            )
        if spec.wide and shape != row.inputs[TARGETS].shape:
            raise Invalid(
                "input.shape",
                f"{where(index, name)} has shape {list(shape)}, but target_tokens has "
                f"{list(row.inputs[TARGETS].shape)}.",
                field=where(index, name),
                index=index,
            )


def _check_values(name: str, rows: list[Row], facts: BaseFacts) -> None:
    if name == TARGETS:
        _widen_targets(rows)
    wanted = "int64" if name == TARGETS else "float32"
    indices: list[int] = []
    arrays: list[Array] = []
    for index, row in enumerate(rows):
        array = row.inputs.get(name)
        if array is None:
            continue
        if array.dtype != wanted:
            raise Invalid(
                "input.dtype",
                f"{where(index, name)} is {array.dtype}; it must be {wanted}.",
                field=where(index, name),
                index=index,
            )
        indices.append(index)
        arrays.append(array)
    values: NDArray[Any] = np.frombuffer(b"".join(array.data for array in arrays), np.dtype(wanted))
    sizes = [math.prod(array.shape) for array in arrays]
    if name == TARGETS:
        bad = (values < 0) | (values >= facts.vocab_size)
        if bad.any():
            at, value = _locate(bad, values, sizes)
            _out_of_vocabulary(indices[at], where(indices[at], name), value, facts)
    elif not np.isfinite(values).all():
        at, value = _locate(~np.isfinite(values), values, sizes)
        index = indices[at]
        raise Invalid(
            "input.not_finite",
            f"{where(index, name)} contains {value}.",
            field=where(index, name),
            index=index,
        )


def _widen_targets(rows: list[Row]) -> None:
    """int32 targets are taken too; the journal keeps them as int64 (rows are replaced in place)."""
    for index, row in enumerate(rows):
        array = row.inputs[TARGETS]
        if array.dtype == "int32":
            wide = Array.of(array.numpy().astype(np.int64))
            rows[index] = Row(row.tokens, {**row.inputs, TARGETS: wide})


def _locate(bad: NDArray[np.bool_], values: NDArray[Any], sizes: list[int]) -> tuple[int, Any]:
    """Which of the joined parts holds the first bad value, and the value."""
    position = int(np.argmax(bad))
    return int(np.searchsorted(np.cumsum(sizes), position, side="right")), values[position].item()


def _out_of_vocabulary(index: int, field: str, value: int, facts: BaseFacts) -> NoReturn:
    raise Invalid(
        "data.vocabulary",
        f"{field} contains {value}; token ids of {facts.name} are 0 to {facts.vocab_size - 1}.",
        field=field,
        index=index,
    )
