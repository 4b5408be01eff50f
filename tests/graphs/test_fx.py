"""The public SDK's custom losses: its trace, sent as data and translated, gives what the SDK computes by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tinker import types
from tinker.lib.public_interfaces.custom_loss import LossHandle, encode_graph, run_loss_handle, trace_loss
from torch import Tensor

from gradserve.compute.engine.graphs import Executable, measure
from gradserve.wire.errors import Invalid
from gradserve.wire.fx import translate
from gradserve.wire.graph import Graph, decode, encode

LENGTHS = (6, 8)

# r = exp(logprobs), a = advantages, m = mask; each line is what the loss returns.
EXPRESSIONS = """
r.sum()
-(torch.minimum(r * a, torch.clamp(r, 0.8, 1.2) * a) * m).sum() / m.sum()
(r.detach() * logprobs * a).sum()
torch.where(m > 0, r, 0.).sum()
torch.where(m > 0, r, a).sum()
torch.clamp(r, min=0.1).sum()
r.clamp(0.5, 1.5).mean(dim=-1, keepdim=True)[0]
torch.mean(input=r, axis=0)
torch.std(r, dim=0, unbiased=False)
r.var(unbiased=False)
r.sum() / math.log(r.shape[0] + 1)
r.sum() / r.size(0) + r.numel() * r.ndim
r.view(a.shape).reshape(r.shape[0], 1).sum()
r[:, None].view(-1, 1).sum()
r[None, :].expand(3, -1).permute(1, 0).sum()
r[1:].sum() + r[..., -1] + r[[0, 1]].sum()
torch.max(r, dim=0).values
torch.max(r) + r.max(0)[0] + torch.max(r, a).sum()
r.sort(descending=True)[0][0] + torch.topk(r, 2).values.sum()
torch.split(r, 2)[0].sum() + torch.cat([r, a], dim=0).sum()
torch.stack([r, a]).T.sum(dim=1).prod()
r.repeat(2).sum() + r.repeat(2, 1).sum() + r.flip(0)[0] + r.roll(1)[0]
2.0 - r.sum() + (1 / r).sum() + (r ** 2).sum() + (2 ** r).sum() - abs(a).sum()
(r @ a) + r.dot(a) + torch.einsum('i,i->', r, a) + torch.tensordot(r, a, dims=1)
torch.outer(r, a).triu().sum()
torch.norm(r) + r.norm(p=1) + torch.linalg.vector_norm(r)
torch.logsumexp(r, 0) + r.cumsum(0)[-1] + torch.logaddexp(r, a).sum()
r.float().to(torch.float64).type_as(r).to(a.dtype).to(a).sum()
(m != 0).float().sum() * r.mean()
torch.zeros_like(r).add(r).sum() + torch.full_like(r, 2.0).mul(r).sum() + r.new_zeros(3).sum()
r.masked_fill(m > 0, 0.).sum() + r.gather(0, m.long()).sum() + F.one_hot(m.long(), 3).sum()
F.relu(r).sum() + F.softplus(a, 2.0).mean() + F.logsigmoid(r).sum() + F.gelu(r, approximate='tanh').sum()
F.elu(a).sum() + F.leaky_relu(a, 0.2).sum() + F.hardtanh(r, -0.5, 0.5).sum() + F.silu(r).sum()
F.softsign(r).sum() + F.tanhshrink(r).sum() + F.softmin(r, dim=0)[0] + F.glu(r[:4], 0).sum()
F.softmax(r, dim=0)[0] + F.log_softmax(r, -1).sum() + r.softmax(-1).max()
F.smooth_l1_loss(r, a, beta=.3) + F.huber_loss(r, a, reduction='sum', delta=.2) + F.mse_loss(r, a) + F.l1_loss(r, a)
F.kl_div(logprobs, m, reduction='sum') + F.kl_div(r, a, reduction='batchmean', log_target=True)
F.binary_cross_entropy_with_logits(r, m) + F.binary_cross_entropy(torch.sigmoid(r), m, reduction='none').sum()
F.normalize(r, dim=0).sum() + F.cosine_similarity(r, a, dim=0) + F.pad(r, (1, 0)).sum()
torch.special.expit(r).log1p().sqrt().square().sum() + torch.lerp(r, a, 0.3).sum() + torch.diff(r).sum()
""".strip().splitlines()

REFUSED = {
    "torch.fft.fft(r).abs().sum()": "fft_fft",
    "torch.rand_like(r).sum()": "rand_like",
    "F.dropout(r, 0.5).sum()": "dropout",
    "r.mul_(2).sum()": "mul_",
    "torch.nonzero(m).sum()": "nonzero",
    "torch.multinomial(r, 1).sum()": "multinomial",
    "getattr(r, 'grad_fn')": "grad_fn",
}


def handle_of(expression: str) -> LossHandle:
    names: dict[str, Any] = {}
    source = (
        f"def loss(logprobs, advantages, mask):\n r, a, m = torch.exp(logprobs), advantages, mask\n x = {expression}\n"
    )
    exec(  # the expressions above; torch.fx wants a function
        "import math, torch\nfrom torch.nn import functional as F\n" + source + " return x, {'custom/x:mean': x}", names
    )
    return trace_loss(names["loss"], {"logprobs": 1, "advantages": 1, "mask": 1}, "session")


def translated(handle: LossHandle) -> Graph:
    """As the gateway gets it: JSON objects."""
    return translate(
        handle.name, [each.model_dump() for each in handle.inputs], encode_graph(handle).model_dump(mode="json")
    )


def data() -> tuple[list[types.Datum], list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    datums, logprobs = [], []
    for length in LENGTHS:
        inputs = {
            "target_tokens": torch.ones(length, dtype=torch.int64),
            "advantages": torch.randn(length, generator=generator),
            "mask": (torch.rand(length, generator=generator) > 0.4).float(),
        }
        tensors = {name: types.TensorData.from_torch(value) for name, value in inputs.items()}
        datums.append(types.Datum(model_input=types.ModelInput.from_ints([1] * length), loss_fn_inputs=tensors))
        logprobs.append(torch.randn(length, generator=generator).requires_grad_())
    return datums, logprobs


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_translated_loss_equals_the_sdks_own(expression: str) -> None:
    handle = handle_of(expression)
    graph = translated(handle)
    assert graph.over == "row"
    executable = Executable(decode(encode(graph)))
    datums, expected_leaves = data()
    expected, metrics = run_loss_handle(handle, datums, expected_leaves)
    leaves = data()[1]
    found = [
        executable.run(
            {"logprobs": leaf, **{name: datum.loss_fn_inputs[name].to_torch() for name in handle.input_names}}
        )
        for datum, leaf in zip(datums, leaves, strict=True)
    ]
    total = found[0]["loss"] + found[1]["loss"]
    assert torch.equal(total, expected)
    assert total.isfinite()
    mean = sum(each["metrics.custom/x:mean"].item() for each in found) / len(found)
    assert mean == pytest.approx(metrics["custom/x:mean"], rel=1e-6)
    if expected.requires_grad:
        torch.autograd.backward(expected)
        torch.autograd.backward(total)
        for leaf, other in zip(leaves, expected_leaves, strict=True):
            assert torch.equal(leaf.grad, other.grad) if leaf.grad is not None else other.grad is None  # type: ignore[arg-type]
    assert measure(executable, {"T": LENGTHS[0]}).flops > 0


@pytest.mark.parametrize("expression", REFUSED)
def test_what_is_not_known_is_refused_by_name(expression: str) -> None:
    with pytest.raises(Invalid, match=REFUSED[expression]) as refused:
        translated(handle_of(expression))
    assert refused.value.code == "graph_operator"


def node(op: str, name: str, target: str, args: list[Any]) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": args, "kwargs": {}}


LOGPROBS = node("placeholder", "logprobs", "logprobs", [])
INPUTS = [{"name": "logprobs", "rank": 1}]
OUTPUT = node("output", "output", "output", [{"tuple": [{"ref": "x"}, {"dict": {}}]}])


@pytest.mark.parametrize(
    ("target", "args", "code"),
    [
        ("os.system", ["true"], "graph_operator"),
        ("builtins.eval", ["1"], "graph_operator"),
        ("torch.ops.aten.add", [{"ref": "logprobs"}, 1], "graph_operator"),
        ("torch.load", ["file"], "graph_operator"),
        ("torch.add", [{"ref": "later"}, 1], "graph_reference"),
        ("torch.add", [{"ref": "logprobs"}, {"code": "1"}], "graph_operator"),
        ("torch.add", [{"ref": "logprobs"}, 10**40], "graph_argument"),
        ("getattr", [{"ref": "logprobs"}, "__class__"], "graph_operator"),
        ("operator.setitem", [{"ref": "logprobs"}, 0, 0], "graph_operator"),
    ],
)
def test_hostile_traces_are_refused(target: str, args: list[Any], code: str) -> None:
    with pytest.raises(Invalid) as refused:
        translate("loss", INPUTS, {"nodes": [LOGPROBS, node("call_function", "x", target, args), OUTPUT]})
    assert refused.value.code == code


@pytest.mark.parametrize(
    "graph",
    [
        {"nodes": [LOGPROBS]},
        {"nodes": "all"},
        {"nodes": [LOGPROBS, node("output", "output", "output", [{"ref": "logprobs"}])]},
        {"nodes": [LOGPROBS, node("call_module", "x", "layer", [])]},
        {"nodes": [node("placeholder", "a", "advantages", [])]},
        {"format": 2, "nodes": []},
        [],
    ],
)
def test_what_is_no_custom_loss_is_refused(graph: object) -> None:
    with pytest.raises(Invalid):
        translate("loss", INPUTS, graph)
