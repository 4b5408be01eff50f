"""What can be asked for: the body of every Op, as the journal keeps it.

An Op is one request on the wire. Its identity is (run, seq) for training, (sampling session, seq) for
sampling; bodies are immutable, so that an Op can be run again at any time and give the same arrays.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from gradserve.wire.control import EnvSpec, PPOConfig, RolloutSpec, SpaceSpec
from gradserve.wire.data import Array, Row

LORA_ALPHA = 32.0
"""lora_alpha of every adapter. It is not on the wire; the low-rank product is scaled by alpha / rank."""


_GRAPH = "graph:"


def graph_loss(digest: str) -> str:
    """The name of a loss that is a stored graph."""
    return _GRAPH + digest


def graph_of(loss: str) -> str | None:
    """The digest of the graph that a loss is; None for a public loss."""
    return loss.removeprefix(_GRAPH) if loss.startswith(_GRAPH) else None


class LoraConfig(msgspec.Struct, frozen=True):
    """Which low-rank adapters a run trains (Hu et al. 2021, arXiv:2106.09685).

    ``seed`` fixes the initial A matrices (B starts at zero); the gateway draws one when the client sends none.
    ``value_head``: a linear map from what the output layer reads to one number is trained with them, zero at first.
    """

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    value_head: bool = False


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


class SgdParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Stochastic gradient descent, as torch.optim.SGD: momentum (Polyak 1964), or Nesterov's.

    ``grad_clip_norm`` as in AdamParams.
    """

    learning_rate: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class CreateModel(msgspec.Struct, frozen=True, tag="create_model"):
    """Make version 0 of a run: fresh adapters on a base, or (``lora`` None) all of the base's parameters."""

    base: str
    lora: LoraConfig | None


class ForwardBackward(msgspec.Struct, frozen=True, tag="forward_backward"):
    """Log-probs of all rows and, with ``backward``, the gradient of the loss, which accumulates.

    ``loss`` is a public one (a sum over tokens) or a graph (``graph_loss``), ``whole`` whether that graph must see all
    rows together.
    """

    rows: list[Row]
    loss: str
    config: dict[str, float]
    backward: bool = True
    whole: bool = False


class OptimStep(msgspec.Struct, frozen=True, tag="optim_step"):
    """One step on the gradients accumulated since the last one: of AdamW, or of SGD where ``sgd`` is given.

    ``coupled_decay`` makes it Adam's: weight decay is added to the gradient (Kingma and Ba 2015, arXiv:1412.6980).
    """

    adam: AdamParams
    coupled_decay: bool = False
    sgd: SgdParams | None = None


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


class CreateLoss(msgspec.Struct, frozen=True, tag="create_loss"):
    """Name a graph that was checked and kept as a loss. Its identity is (session, number); its answer is the name."""

    graph: str


class CreateModule(msgspec.Struct, frozen=True, tag="create_module"):
    """Make version 0 of a run that trains a module: its forward ``graph``, its parameters and buffers ``weights``."""

    graph: str
    weights: str


class ApplyGraph(msgspec.Struct, frozen=True, tag="apply_graph"):
    """Run a ``graph`` of a module's parameters on ``arrays``; with ``backward`` its loss's gradient accumulates."""

    graph: str
    arrays: dict[str, Array]
    backward: bool


class Rollout(msgspec.Struct, frozen=True, tag="rollout"):
    """Let a policy act in environments; the trajectories accumulate, as gradients do, until an UpdatePolicy."""

    graph: str
    spec: RolloutSpec


class PutTrajectory(msgspec.Struct, frozen=True, tag="put_trajectory"):
    """A trajectory that was made on the client accumulates, as a Rollout's do; ``trajectory`` is its object."""

    trajectory: str


class UpdatePolicy(msgspec.Struct, frozen=True, tag="update_policy"):
    """A step: PPO on the trajectories that have accumulated. ``seed`` draws the minibatches.

    Actions are of ``space``, or of the environment ``env``: one of them is given.
    """

    graph: str
    space: SpaceSpec | None
    env: EnvSpec | None
    config: PPOConfig
    seed: int


class Evaluate(msgspec.Struct, frozen=True, tag="evaluate"):
    """Whole episodes of a policy as it is; nothing accumulates. ``deterministic``: the most likely action.

    ``normalise_observations`` and ``clip_observation`` as in RolloutSpec.
    """

    graph: str
    env: EnvSpec
    episodes: int
    seed: int
    deterministic: bool = True
    normalise_observations: bool = False
    clip_observation: float = 10.0


MODULE = "module:"
"""What the base of a run that trains a module starts with; its forward graph's digest follows."""


def module_base(graph: str) -> str:
    """The base of a run that trains the module whose forward graph this is."""
    return MODULE + graph


def module_graph(base: str) -> str | None:
    """The digest of the forward graph of a module that is a run's base; None for a language model."""
    return base.removeprefix(MODULE) if base.startswith(MODULE) else None


ModuleOp = CreateModule | ApplyGraph | Rollout | PutTrajectory | UpdatePolicy | Evaluate
TrainingOp = CreateModel | ForwardBackward | OptimStep | SaveWeights | SaveForSampling | LoadWeights
OpBody = CreateLoss | Sample | TrainingOp | ModuleOp
OpKind = Literal[
    "create_loss",
    "create_model",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_for_sampling",
    "load_weights",
    "sample",
    "create_module",
    "apply_graph",
    "rollout",
    "put_trajectory",
    "update_policy",
    "evaluate",
]

STEPS: tuple[OpKind, ...] = ("optim_step", "update_policy")
"""Kinds of Ops that make a new version of a run's weights from what has accumulated."""

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
