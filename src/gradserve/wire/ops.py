"""What can be asked for: the body of every Op, as the journal keeps it.

An Op is one request on the wire. Its identity is (run, seq) for training, (sampling session, seq) for
sampling; bodies are immutable, so that an Op can be run again at any time and give the same arrays.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from gradserve.wire.data import Array, Row

LORA_ALPHA = 32.0
"""lora_alpha of every adapter. It is not on the wire; the low-rank product is scaled by alpha / rank."""


class LoraConfig(msgspec.Struct, frozen=True):
    """Which low-rank adapters a run trains (Hu et al. 2021, arXiv:2106.09685).

    ``seed`` fixes the initial A matrices (B starts at zero); the gateway draws one when the client sends none.
    """

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


class AdamParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """AdamW with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101), as torch.optim.AdamW.

    ``grad_clip_norm`` is a bound on the global L2 norm of the gradient; 0 switches clipping off.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class SamplingParams(msgspec.Struct, frozen=True):
    """How to sample.

    ``max_tokens`` is resolved by the gateway (never absent here). ``stop_tokens`` and ``stop_strings`` are
    already resolved too: the model's own end-of-sequence ids when the client gave no ``stop``.
    ``seed`` belongs to the request; sample i of it uses the stream (seed, i).
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


class CreateModel(msgspec.Struct, frozen=True, tag="create_model"):
    """Make version 0 of a run: fresh adapters on a base, or (``lora`` None) all of the base's parameters."""

    base: str
    lora: LoraConfig | None


class ForwardBackward(msgspec.Struct, frozen=True, tag="forward_backward"):
    """Log-probs of all rows and, with ``backward``, the gradient of the summed loss, which accumulates."""

    rows: list[Row]
    loss: str
    config: dict[str, float]
    backward: bool = True


class OptimStep(msgspec.Struct, frozen=True, tag="optim_step"):
    """One AdamW step on the gradients accumulated since the last one."""

    adam: AdamParams


class SaveWeights(msgspec.Struct, frozen=True, tag="save_weights"):
    """Name the current version and make it durable. ``kind`` is the middle of the checkpoint's path.

    ``client_state`` is the object that held the client's own state of the run when it asked for this.
    """

    name: str
    kind: Literal["weights", "sampler_weights", "external_weights"]
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] = {}
    client_state: str | None = None


class SaveForSampling(msgspec.Struct, frozen=True, tag="save_for_sampling"):
    """Open an unnamed sampling session on the current version."""

    sampling_session_id: str


class LoadWeights(msgspec.Struct, frozen=True, tag="load_weights"):
    """Make a checkpoint the run's current version, with or without its optimizer moments.

    ``creates`` says that this Op is also the birth of the run (seq 0).
    """

    path: str
    optimizer: bool
    creates: bool = False


class Sample(msgspec.Struct, frozen=True, tag="sample"):
    """Continue a prompt ``num_samples`` times.

    ``prompt`` are int32 ids. ``weights`` is the digest of the adapter (None: the base alone) and ``version`` its
    number in its run, frozen at submit, so that a sample always comes from exactly the version its session names.
    ``target_prompt_ids`` is int64 [len(prompt) - 1, K]: ids whose log-probs are wanted at prompt positions
    1.., -1 for an empty cell.
    """

    base: str
    weights: str | None
    prompt: bytes
    num_samples: int
    params: SamplingParams
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_ids: Array | None = None
    version: int | None = None


OpBody = CreateModel | ForwardBackward | OptimStep | SaveWeights | SaveForSampling | LoadWeights | Sample
OpKind = Literal[
    "create_model",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_for_sampling",
    "load_weights",
    "sample",
]

_decoder = msgspec.msgpack.Decoder(OpBody)


def encode_body(body: OpBody) -> bytes:
    """An Op's body as msgpack."""
    return msgspec.msgpack.encode(body)


def decode_body(data: bytes) -> OpBody:
    """The inverse of :func:`encode_body`."""
    return _decoder.decode(data)


def kind_of(body: OpBody) -> OpKind:
    """The tag of a body."""
    return body.__struct_config__.tag  # type: ignore[return-value]
