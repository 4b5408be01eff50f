"""The protobuf codec against the public SDK's own: what it encodes we decode, what we encode it decodes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor
from numpy.typing import NDArray
from tinker import types
from tinker.proto import tinker_public_pb2 as public
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from gradserve.wire import codec
from gradserve.wire.data import Array, as_tokens, tokens_of
from gradserve.wire.errors import Invalid, Unsupported
from gradserve.wire.proto import gradserve_wire_pb2 as pb
from gradserve.wire.results import ForwardBackwardResult, SampledSequence, SampleResult, TopK


def f32(*values: float) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


def sdk_request(data: list[types.Datum], loss: Any = "cross_entropy", config: Any = None, seq: int = 7) -> bytes:
    request = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=config),
        model_id="s:train:0",
        seq_id=seq,
    )
    return forward_backward_request_to_proto(request).SerializeToString()


def datum(chunks: list[list[int]], **inputs: Any) -> types.Datum:
    texts: list[Any] = [types.EncodedTextChunk(tokens=tokens) for tokens in chunks]
    return types.Datum(model_input=types.ModelInput(chunks=texts), loss_fn_inputs=inputs)


def one_row(message: pb.ForwardBackwardRequest, limit: int = codec.MAX_DENSE_BYTES) -> Any:
    return codec.decode_forward_backward(message.SerializeToString()).rows(limit)[0]


def with_tensor(tensor: pb.Tensor, tokens: list[int]) -> pb.ForwardBackwardRequest:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    added = message.data.add()
    added.model_input.add().encoded_text.tokens = as_tokens(tokens)
    added.loss_fn_inputs["target_tokens"].CopyFrom(tensor)
    return message


def csr(values: Any, crow: list[int], col: list[int], shape: list[int], dtype: Any = pb.DTYPE_INT64) -> pb.Tensor:
    tensor = pb.Tensor(dtype=dtype, shape=shape)
    tensor.sparse_csr.values = values.tobytes()
    tensor.sparse_csr.crow_indices = np.array(crow, dtype="<i8").tobytes()
    tensor.sparse_csr.col_indices = np.array(col, dtype="<i8").tobytes()
    return tensor


@pytest.mark.parametrize("name", sorted(public.DESCRIPTOR.message_types_by_name))
def test_our_messages_have_the_sdks_fields(name: str) -> None:
    if name in ("SamplingParams", "StopStrings", "StopTokens"):
        pytest.skip("the SDK defines it and never sends it")

    def fields(message: Descriptor) -> list[tuple[object, ...]]:
        return [(f.number, f.name, f.type, f.is_repeated, f.has_presence) for f in message.fields]

    theirs = public.DESCRIPTOR.message_types_by_name[name]
    assert fields(pb.DESCRIPTOR.message_types_by_name[name]) == fields(theirs)


def test_request_round_trip() -> None:
    body = sdk_request(
        [
            datum([[1, 2, 3]], target_tokens=np.array([2, 3, 4]), weights=f32(0, 0.5, 1)),
            datum([[5], [6, 7]], target_tokens=np.array([6, 7, 8]), weights=f32(1, 1, -1)),
        ]
    )
    request = codec.decode_forward_backward(body)
    assert (request.model_id, request.seq_id, request.loss) == ("s:train:0", 7, "cross_entropy")
    assert request.config == {}
    assert not request.forward_only
    first, second = request.rows()
    assert tokens_of(first).tolist() == [1, 2, 3]
    assert tokens_of(second).tolist() == [5, 6, 7], "text chunks are joined"
    assert first.inputs["target_tokens"].dtype == "int64"
    assert first.inputs["target_tokens"].numpy().tolist() == [2, 3, 4]
    assert second.inputs["weights"].numpy().tolist() == [1, 1, -1]


def test_forward_only_is_read() -> None:
    message = forward_backward_request_to_proto(
        types.ForwardBackwardRequest(
            forward_backward_input=types.ForwardBackwardInput(data=[], loss_fn="cross_entropy"),
            model_id="m",
            seq_id=1,
        )
    )
    message.forward_only = True
    assert codec.decode_forward_backward(message.SerializeToString()).forward_only


def test_config_prefers_v2() -> None:
    body = sdk_request([], "ppo", {"clip_low_threshold": 0.9, "loss_id": "abc"})
    assert codec.decode_forward_backward(body).config == {"clip_low_threshold": 0.9, "loss_id": "abc"}
    old = pb.ForwardBackwardRequest(loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.7})
    assert codec.decode_forward_backward(old.SerializeToString()).config == {"clip_low_threshold": 0.7}


def test_provenance_spans_are_passed_over() -> None:
    message = with_tensor(pb.Tensor(dense=np.array([2], "<i8").tobytes(), dtype=pb.DTYPE_INT64, shape=[1]), [1])
    message.data[0].model_input_spans.add().sampled_tokens.sequence_id = "s:sample:0:1:0"
    assert tokens_of(one_row(message)).tolist() == [1]


def test_sdk_sparse_targets_become_dense() -> None:
    import torch

    dense = torch.zeros((6, 8), dtype=torch.int64)
    dense[0, 1], dense[4, 7] = 5, 9
    sparse = types.TensorData.from_torch_sparse(dense)
    assert sparse.sparse_crow_indices is not None
    weights = types.TensorData.from_torch_sparse(dense.float())
    body = sdk_request([datum([[1, 2, 3, 4, 5, 6]], target_tokens=sparse, weights=weights)])
    row = codec.decode_forward_backward(body).rows()[0]
    assert row.inputs["target_tokens"].shape == (6, 8)
    assert row.inputs["target_tokens"].numpy().tolist() == dense.tolist()
    assert row.inputs["weights"].numpy().tolist() == dense.float().tolist()


def test_bfloat16_and_int32() -> None:
    halves = (f32(1.5, -2).view("<u4") >> 16).astype("<u2")
    tensor = pb.Tensor(dense=halves.tobytes(), dtype=pb.DTYPE_BFLOAT16, shape=[2])
    array = one_row(with_tensor(tensor, [1, 2])).inputs["target_tokens"]
    assert (array.dtype, array.numpy().tolist()) == ("float32", [1.5, -2])
    tensor = pb.Tensor(dense=np.array([3, 4], "<i4").tobytes(), dtype=pb.DTYPE_INT32)
    array = one_row(with_tensor(tensor, [1, 2])).inputs["target_tokens"]
    assert (array.dtype, array.shape, array.numpy().tolist()) == ("int32", (2,), [3, 4]), "no shape means one dimension"


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (pb.Tensor(dense=b"1234567", dtype=pb.DTYPE_INT64, shape=[1]), "7 bytes"),
        (pb.Tensor(dense=b"123", dtype=pb.DTYPE_BFLOAT16, shape=[1]), "multiple of 2"),
        (pb.Tensor(dense=b"", dtype=pb.DTYPE_FLOAT32, shape=[2**40, 2**40]), "holds 0 bytes"),
        (pb.Tensor(dense=b"", dtype=pb.DTYPE_FLOAT32, shape=[-1]), "negative"),
        (pb.Tensor(dense=b"1234", shape=[1]), "dtype 0"),
        (csr(np.array([1]), [0, 1], [0], [2, 3]), r"row pointers for 2 rows"),
        (csr(np.array([1]), [0, 1, 1], [3], [2, 3]), "column index"),
        (csr(np.array([1]), [0, 2, 1], [0], [2, 3]), "must rise"),
        (csr(np.array([1]), [0, 1, 1], [0], [1, 3]), "the row has 2 tokens"),
        (csr(np.array([1]), [0, 1, 1], [0], [6]), "the row has 2 tokens"),
    ],
)
def test_unreadable_tensors_name_row_and_field(tensor: pb.Tensor, said: str) -> None:
    with pytest.raises(Invalid, match=said) as caught:
        one_row(with_tensor(tensor, [1, 2]))
    assert caught.value.code == "data.tensor"
    assert caught.value.field == "data[0].loss_fn_inputs.target_tokens"
    assert caught.value.index == 0


def test_sparse_bomb_is_refused_before_it_is_allocated() -> None:
    tensor = csr(np.array([], dtype="<i8"), [0, 0, 0], [], [2, 2**40])
    with pytest.raises(Invalid) as caught:
        one_row(with_tensor(tensor, [1, 2]))
    assert caught.value.code == "data.too_large"
    tensor = csr(np.array([], dtype="<i8"), [0, 0, 0], [], [2, 100])
    with pytest.raises(Invalid):
        one_row(with_tensor(tensor, [1, 2]), limit=1599)
    assert one_row(with_tensor(tensor, [1, 2]), limit=1600).inputs["target_tokens"].shape == (2, 100)


@pytest.mark.parametrize("kind", ["image", "dmel"])
def test_other_chunks_are_unsupported(kind: str) -> None:
    message = pb.ForwardBackwardRequest()
    chunk = message.data.add().model_input.add()
    getattr(chunk, kind).SetInParent()
    with pytest.raises(Unsupported, match=kind) as caught:
        one_row(message)
    assert caught.value.field == "data[0].model_input"


def test_not_a_message() -> None:
    with pytest.raises(Invalid) as caught:
        codec.decode_forward_backward(b"\xff\xff\xff")
    assert caught.value.code == "body.malformed"


@pytest.mark.parametrize("seq", [1, 127, 128, 2**31 - 1])
def test_identity_is_in_the_first_bytes_of_what_the_sdk_sends(seq: int) -> None:
    body = sdk_request([datum([[1] * 1000], target_tokens=np.ones(1000, np.int64))], seq=seq)
    assert codec.peek_identity(body[:64]) == ("s:train:0", seq)
    assert codec.peek_identity(body[:8]) == ("", 0)
    assert codec.peek_identity(b"") == ("", 0)
    assert codec.peek_identity(b"\x0a\x03abc\x1a") == ("", 0)


def test_training_result_round_trip_ragged_and_mixed_shapes() -> None:
    rows = [f32(-1, -2, -3), f32(-4), np.arange(6, dtype=np.float32).reshape(3, 2), f32(-5, -6)]
    result = ForwardBackwardResult([Array.of(row) for row in rows], {"loss:sum": 2.5, "tokens:sum": 6.0})
    decoded = deserialize_forward_backward_output(codec.encode_forward_backward(result))
    assert decoded.loss_fn_output_type == "ArrayRecord"
    assert decoded.metrics == {"loss:sum": 2.5, "tokens:sum": 6.0}
    assert [output["logprobs"].shape for output in decoded.loss_fn_outputs] == [[3], [1], [3, 2], [2]]
    for output, row in zip(decoded.loss_fn_outputs, rows, strict=True):
        np.testing.assert_array_equal(output["logprobs"].to_numpy(), row)


def test_num_datums_survives_without_fields() -> None:
    result = ForwardBackwardResult([Array.of(f32(-1)), Array.of(f32(-1, -2))], {})
    message = public.ForwardBackwardOutput.FromString(codec.encode_forward_backward(result))
    assert [record.num_datums for record in message.loss_fn_outputs] == [2]


def test_sample_result_round_trip() -> None:
    topk = TopK(Array.of(np.array([[1, 2], [3, 4]], np.int32)), Array.of(np.full((2, 2), -1, np.float32)))
    result = SampleResult(
        sequences=[
            SampledSequence(as_tokens([5, 6]), f32(-0.5, -1).tobytes(), True, topk),
            SampledSequence(as_tokens([7]), f32(-2).tobytes(), False),
        ],
        prompt_logprobs=f32(np.nan, -1, -2).tobytes(),
        topk_prompt=topk,
        target_prompt_logprobs=Array.of(np.array([[-1, 0], [-2, -3]], np.float32)),
        cached_prompt_tokens=2,
    )
    decoded = deserialize_sample_response(codec.encode_sample(result))
    first, second = decoded.sequences
    assert (first.tokens, first.stop_reason) == ([5, 6], "stop")
    assert (second.tokens, second.stop_reason) == ([7], "length")
    assert first.logprobs == [-0.5, -1.0]
    assert first.topk_logprobs_np is not None
    assert first.topk_logprobs_np.token_ids.tolist() == [[1, 2], [3, 4]]
    assert second.topk_logprobs_np is None
    assert decoded.prompt_logprobs == [None, -1.0, -2.0]
    assert decoded.topk_prompt_logprobs_np is not None
    assert decoded.target_prompt_logprobs is not None
    assert decoded.target_prompt_logprobs.to_numpy().tolist() == [[-1, 0], [-2, -3]]
    assert decoded.prompt_cache_hit_tokens == 2
    assert decoded.prompt_alt_tokens is None


def test_plain_sample_has_no_prompt_logprobs() -> None:
    result = SampleResult([SampledSequence(as_tokens([5]), f32(-1).tobytes(), False)])
    decoded = deserialize_sample_response(codec.encode_sample(result))
    assert decoded.prompt_logprobs is None
    assert decoded.topk_prompt_logprobs_np is None
    assert decoded.target_prompt_logprobs is None


def test_json_tokens() -> None:
    assert codec.decode_json_tokens([[1, 2], [], [3]]) == as_tokens([1, 2, 3])
    assert codec.decode_json_tokens([]) == b""
    for far in (2**31, -(2**40), 2**70):
        with pytest.raises(OverflowError):
            codec.decode_json_tokens([[1, far]])


_DIGEST = """
import hashlib, sys
from gradserve.wire import codec
from gradserve.wire.ops import ForwardBackward, encode_body
rows = codec.decode_forward_backward(sys.stdin.buffer.read()).rows()
print(hashlib.sha256(encode_body(ForwardBackward(rows, "loss", {}))).hexdigest())
"""


def test_a_request_is_the_same_in_every_process() -> None:
    """A protobuf map has another order in each process; a request that is sent again after a restart must be known."""
    inputs = {f"input_{number}": types.TensorData(data=[0.5], dtype="float32", shape=[1]) for number in range(12)}
    sent = sdk_request([datum([[5]], target_tokens=types.TensorData(data=[5], dtype="int64", shape=[1]), **inputs)])
    decoded = {
        subprocess.run([sys.executable, "-c", _DIGEST], input=sent, capture_output=True, check=True).stdout
        for _ in range(4)
    }
    assert len(decoded) == 1
