"""Between the client's protobuf and the words of wire/: training requests in, training and sampling results out.

Bytes stay bytes: a row's tokens and tensors are sliced out of the message and looked at through
``numpy.frombuffer``; no number ever becomes a Python object. What arrives is only checked for being *readable*
(lengths, shapes, sparse indices); whether the values make sense is the gateway's business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from gradserve.wire.data import Array, DType, Row, as_tokens
from gradserve.wire.errors import Invalid, Unsupported
from gradserve.wire.proto import gradserve_wire_pb2 as pb
from gradserve.wire.results import ForwardBackwardResult, SampledSequence, SampleResult, TopK

PROTOBUF = "application/x-protobuf"
JSON = "application/json"

MAX_DENSE_BYTES = 256 << 20
"""Default bound on what the sparse tensors of one request may grow to."""

_DTYPES: dict[int, DType] = {
    pb.DTYPE_FLOAT32: "float32",
    pb.DTYPE_INT64: "int64",
    pb.DTYPE_INT32: "int32",
}
_TO_PROTO: dict[str, pb.DType] = {
    "float32": pb.DTYPE_FLOAT32,
    "int64": pb.DTYPE_INT64,
    "int32": pb.DTYPE_INT32,
}


@dataclass(frozen=True)
class TrainingRequest:
    """A ForwardBackwardRequest with its rows still encoded, so that its identity is known even if they are bad."""

    model_id: str
    seq_id: int
    forward_only: bool
    loss: str
    config: dict[str, float | str]
    message: pb.ForwardBackwardRequest

    def rows(self, max_dense_bytes: int = MAX_DENSE_BYTES) -> list[Row]:
        """Decode all rows. Raises Invalid or Unsupported naming ``data[i]``."""
        budget = _Budget(max_dense_bytes)
        return [_row(i, datum, budget) for i, datum in enumerate(self.message.data)]


def decode_forward_backward(body: bytes) -> TrainingRequest:
    """Read the envelope of a training request. Raises Invalid when ``body`` is not that message."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise Invalid("body.malformed", f"The body is not a protobuf ForwardBackwardRequest ({error}).") from error
    config: dict[str, float | str] = dict(message.loss_fn_config)
    if message.loss_fn_config_v2:
        # Numbers are mirrored into the older map; text exists only in the newer one.
        config = {
            key: value.text if value.HasField("text") else value.number
            for key, value in message.loss_fn_config_v2.items()
        }
    return TrainingRequest(message.model_id, message.seq_id, message.forward_only, message.loss_fn, config, message)


def peek_identity(start: bytes) -> tuple[str, int]:
    """(model_id, seq_id) from the first bytes of a ForwardBackwardRequest; ("", 0) if they can't be read.

    Encoders write fields in the order of their numbers, so these two come first even in a message that is cut off.
    """
    try:
        tag, size = start[0], start[1]
        model_id, rest = start[2 : 2 + size], start[2 + size :]
        if tag != 0x0A or size >= 0x80 or rest[0] != 0x10:  # field 1 of short length, then field 2 as varint
            return "", 0
        end = next(i for i, byte in enumerate(rest[1:11], 2) if byte < 0x80)
        header = pb.ForwardBackwardRequest.FromString(start[: 2 + size] + rest[:end])
    except (IndexError, StopIteration, DecodeError):
        return "", 0
    return (header.model_id, header.seq_id) if len(model_id) == size else ("", 0)


class _Budget:
    """What is left of the bytes that sparse tensors may be expanded to."""

    def __init__(self, left: int) -> None:
        self.left = left

    def take(self, wanted: int, where: str, index: int) -> None:
        self.left -= wanted
        if self.left < 0:
            raise Invalid(
                "data.too_large",
                f"{where} would expand to {wanted} bytes, more than this request may still use.",
                field=where,
                index=index,
                fix="Send fewer rows per request, or fewer columns.",
            )


def _row(index: int, datum: pb.Datum, budget: _Budget) -> Row:
    tokens = _tokens(index, datum)
    length = len(tokens) // 4
    # A protobuf map has no order: another process may iterate over the same bytes in another one. Sorted, so that a
    # request that is sent again after a restart is the same request.
    inputs = {
        name: _array(datum.loss_fn_inputs[name], f"data[{index}].loss_fn_inputs.{name}", index, length, budget)
        for name in sorted(datum.loss_fn_inputs)
    }
    return Row(tokens=tokens, inputs=inputs)


def _tokens(index: int, datum: pb.Datum) -> bytes:
    where = f"data[{index}].model_input"
    parts: list[bytes] = []
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            raise _no_text(where, index, chunk.WhichOneof("chunk") or "empty")
        parts.append(chunk.encoded_text.tokens)
    tokens = parts[0] if len(parts) == 1 else b"".join(parts)
    if len(tokens) % 4:
        raise Invalid(
            "data.tensor",
            f"{where} holds {len(tokens)} bytes of tokens, not a multiple of 4 (int32).",
            field=where,
            index=index,
        )
    return tokens


def _no_text(where: str, index: int, kind: str) -> Unsupported:
    return Unsupported(
        "unsupported.chunk",
        f"{where} has a chunk of type {kind!r}.",
        field=where,
        index=index,
        fix="This server takes text only: send encoded_text chunks.",
    )


def _array(tensor: pb.Tensor, where: str, index: int, length: int, budget: _Budget) -> Array:
    shape = tuple(tensor.shape)
    if any(side < 0 for side in shape):
        raise _bad_tensor(where, index, f"has a negative side in its shape {list(shape)}")
    if tensor.HasField("sparse_csr"):
        return _sparse(tensor, shape, where, index, length, budget)
    return _dense(tensor.dense, tensor.dtype, shape, where, index)


def _bad_tensor(where: str, index: int, what: str) -> Invalid:
    return Invalid("data.tensor", f"{where} {what}.", field=where, index=index)


def _dense(data: bytes, dtype: int, shape: tuple[int, ...], where: str, index: int) -> Array:
    """Bytes of a wire dtype as an Array; bfloat16 becomes float32. No shape means one dimension."""
    if dtype == pb.DTYPE_BFLOAT16:
        if len(data) % 2:
            raise _bad_tensor(where, index, f"holds {len(data)} bytes, not a multiple of 2 (bfloat16)")
        # bfloat16 is the upper half of a float32.
        data = (np.frombuffer(data, "<u2").astype("<u4") << 16).tobytes()
        dtype = pb.DTYPE_FLOAT32
    name = _DTYPES.get(dtype)
    if name is None:
        raise _bad_tensor(where, index, f"has dtype {dtype}; known are float32, int64, int32 and bfloat16")
    size = 8 if name == "int64" else 4
    if not shape:
        shape = (len(data) // size,)
    if len(data) != math.prod(shape) * size:
        raise _bad_tensor(
            where, index, f"holds {len(data)} bytes, but {name} of shape {list(shape)} takes {math.prod(shape) * size}"
        )
    return Array(name, shape, data)


def _sparse(tensor: pb.Tensor, shape: tuple[int, ...], where: str, index: int, length: int, budget: _Budget) -> Array:
    """A CSR matrix made dense. The shape is checked against the row's length before anything is allocated."""
    csr = tensor.sparse_csr
    if len(shape) != 2 or shape[0] != length:
        raise _bad_tensor(
            where,
            index,
            f"is sparse with shape {list(shape)}, but the row has {length} tokens: [{length}, K] is needed",
        )
    values = _dense(csr.values, tensor.dtype, (), where, index).numpy()
    if len(csr.crow_indices) % 8 or len(csr.col_indices) % 8:
        raise _bad_tensor(where, index, "has CSR indices that are not int64")
    budget.take(shape[0] * shape[1] * values.dtype.itemsize, where, index)
    try:
        dense = densify(values, np.frombuffer(csr.crow_indices, "<i8"), np.frombuffer(csr.col_indices, "<i8"), shape, 0)
    except ValueError as error:
        raise _bad_tensor(where, index, f"has CSR indices that do not fit: {error}") from error
    return Array.of(dense)


def densify(
    values: NDArray[Any],
    crow: NDArray[np.int64],
    col: NDArray[np.int64],
    shape: tuple[int, ...],
    fill: int,
) -> NDArray[Any]:
    """The dense form of a CSR matrix, ``fill`` in cells that are not listed. Raises ValueError on bad indices."""
    n, k = shape
    if len(crow) != n + 1:
        raise ValueError(f"{len(crow)} row pointers for {n} rows")
    counts = np.diff(crow)
    if crow[0] != 0 or crow[-1] != len(col) or len(col) != len(values) or (counts < 0).any():
        raise ValueError("row pointers must rise from 0 to the number of values")
    if len(col) and (col.min() < 0 or col.max() >= k):
        raise ValueError(f"a column index is outside [0, {k})")
    dense = np.full((n, k), fill, dtype=values.dtype)
    dense[np.repeat(np.arange(n), counts), col] = values
    return dense


def decode_json_tokens(chunks: Sequence[Sequence[int]]) -> bytes:
    """The token lists of a prompt's text chunks as one string of int32. Raises OverflowError beyond int32."""
    ids = chunks[0] if len(chunks) == 1 else [token for chunk in chunks for token in chunk]
    wide = np.array(ids, dtype=np.int64)
    narrow = wide.astype(np.int32)
    if not np.array_equal(wide, narrow):
        raise OverflowError("a token id does not fit 32 bits")
    return as_tokens(narrow)


def encode_forward_backward(result: ForwardBackwardResult) -> bytes:
    """A training result as the client reads it: one ArrayRecord per run of rows with the same trailing shape."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics.update(result.metrics)
    for (dtype, trailing), group in groupby(result.logprobs, key=lambda a: (a.dtype, a.shape[1:])):
        arrays = list(group)
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays))
        field = record.fields["logprobs"]
        field.data = b"".join(array.data for array in arrays)
        field.offsets = np.cumsum([0, *(len(array.data) for array in arrays)], dtype="<i8").tobytes()
        field.dtype = _TO_PROTO[dtype]
        field.trailing_shape.extend(trailing)
    return message.SerializeToString()


def encode_sample(result: SampleResult) -> bytes:
    """A sampling result as the client reads it. ``target_prompt_logprobs`` is always dense."""
    message = pb.SampleResponse(prompt_cache_hit_tokens=result.cached_prompt_tokens)
    for sequence in result.sequences:
        _add_sequence(message, sequence)
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = result.prompt_logprobs
    if result.topk_prompt is not None:
        _fill_topk(message.topk_prompt_logprobs, result.topk_prompt)
    if result.target_prompt_logprobs is not None:
        target = result.target_prompt_logprobs
        message.target_prompt_logprobs.dense = target.data
        message.target_prompt_logprobs.dtype = _TO_PROTO[target.dtype]
        message.target_prompt_logprobs.shape.extend(target.shape)
    return message.SerializeToString()


def _add_sequence(message: pb.SampleResponse, sequence: SampledSequence) -> None:
    added = message.sequences.add(
        stop_reason=pb.STOP_REASON_STOP if sequence.stopped else pb.STOP_REASON_LENGTH,
        tokens=sequence.tokens,
        logprobs=sequence.logprobs,
    )
    if sequence.topk is not None:
        _fill_topk(added.topk_sampled_logprobs, sequence.topk)


def _fill_topk(message: pb.TopkLogprobs, topk: TopK) -> None:
    message.length, message.k = topk.token_ids.shape
    message.token_ids = topk.token_ids.data
    message.logprobs = topk.logprobs.data
