"""The JSON bodies that clients send.

Where an unknown field could silently change what is computed (``min_p``, a new optimizer) the struct forbids it;
elsewhere it is ignored, so that newer clients keep working. ``type`` repeats the endpoint's name and is not looked at.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gradserve.wire.control import EnvSpec, PPOConfig, RolloutSpec, SpaceSpec
from gradserve.wire.data import Array
from gradserve.wire.ops import AdamParams, SgdParams


class Lenient(msgspec.Struct, frozen=True):
    """Unknown fields are ignored."""


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Unknown fields are refused."""

    type: str = ""


class Identity(Lenient, frozen=True):
    """What can be read of a request whose other fields are wrong."""

    model_id: str = ""
    seq_id: int = 0


class CreateSessionBody(Lenient, frozen=True):
    """POST create_session."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionBody(Lenient, frozen=True):
    """POST session_heartbeat."""

    session_id: str


class FinishReason(Lenient, frozen=True):
    """Why a session ended."""

    type: Literal["success", "errored", "interrupted"]


class FinishBody(Lenient, frozen=True):
    """POST sessions/{id}/finish."""

    reason: FinishReason
    detail: str | None = None


class SearchOwner(Lenient, frozen=True):
    """Whose sessions."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[str] | None = None


class StatusQuery(Lenient, frozen=True):
    """A status to match."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[str] | None = None


class SearchCursor(Lenient, frozen=True):
    """Where the next page starts. ``last_created_at`` is an RFC 3339 time."""

    last_created_at: str
    last_session_id: str


class SearchBody(Strict, frozen=True, kw_only=True):
    """POST sessions/search."""

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    display_name: str | None = None
    owner: SearchOwner = SearchOwner()
    statuses: list[StatusQuery] | None = None
    limit: int = 50
    cursor: SearchCursor | None = None


class ModelBody(Lenient, frozen=True):
    """POST get_info."""

    model_id: str


class LoraBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which adapters to train."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class ExtensionBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What gradserve adds to create_model: which parameters are trained. The public SDK never sends it.

    ``value_head``: adapters get a value head beside them (ops.LoraConfig).
    """

    parameters: Literal["lora", "full"] = "lora"
    value_head: bool = False


class CreateModelBody(Strict, frozen=True, kw_only=True):
    """POST create_model."""

    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraBody | None = None
    optimizer_config: dict[str, Any] | None = None
    gradserve: ExtensionBody | None = None


class OptimStepBody(Strict, frozen=True, kw_only=True):
    """POST optim_step. ``adam_params`` or the parameters of another optimizer."""

    model_id: str
    seq_id: int
    adam_params: AdamParams | None = None
    optim_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeightsBody(Strict, frozen=True, kw_only=True):
    """POST save_weights."""

    model_id: str
    seq_id: int
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None


class SaveForSamplerBody(Strict, frozen=True, kw_only=True):
    """POST save_weights_for_sampler: with ``path`` a checkpoint, with ``sampling_session_seq_id`` a session."""

    model_id: str
    seq_id: int
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, Any] | None = None


class SaveExternalBody(Strict, frozen=True, kw_only=True):
    """POST save_weights_external."""

    model_id: str
    seq_id: int
    path: str | None = None
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None


class LoadWeightsBody(Strict, frozen=True, kw_only=True):
    """POST load_weights: into (model_id, seq_id), or creating (session_id, model_seq_id)."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: dict[str, Any] | None = None
    weights_access_token: str | None = None


class CreateSamplingSessionBody(Strict, frozen=True, kw_only=True):
    """POST create_sampling_session."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class SamplerBody(Lenient, frozen=True):
    """POST join_sampling_session."""

    sampling_session_id: str


class ChunkBody(Lenient, frozen=True):
    """A piece of a prompt. Only ``encoded_text`` is served."""

    type: str
    tokens: list[int] = []


class PromptBody(Lenient, frozen=True):
    """The prompt's chunks, in order."""

    chunks: list[ChunkBody]


class SamplingParamsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to sample. ``stop`` absent means the model's own end; an empty list means that nothing stops."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class TensorBody(Strict, frozen=True, kw_only=True):
    """An int64 tensor in JSON, dense or CSR."""

    data: list[int]
    dtype: str
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class SampleBody(Strict, frozen=True, kw_only=True):
    """POST asample."""

    prompt: PromptBody
    sampling_params: SamplingParamsBody
    sampling_session_id: str | None = None
    seq_id: int
    num_samples: int = 1
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorBody | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


class RetrieveFutureBody(Lenient, frozen=True):
    """POST retrieve_future. Payloads are always sent whole, so ``allow_metadata_only`` changes nothing."""

    request_id: str
    allow_metadata_only: bool = False


class CancelFutureBody(Lenient, frozen=True):
    """POST cancel_future."""

    request_id: str


class PathBody(Lenient, frozen=True):
    """POST weights_info."""

    tinker_path: str


class ImportBody(Strict, frozen=True, kw_only=True):
    """POST gradserve/import. ``config`` is adapter_config.json, ``weights`` adapter_model.safetensors in base64."""

    base: str
    config: dict[str, Any]
    weights: bytes
    name: str = "imported"


class CreateCustomLossBody(Strict, frozen=True, kw_only=True):
    """POST create_custom_loss. ``inputs`` are {name, rank}; ``graph`` is a torch.fx graph as data (wire/fx.py)."""

    session_id: str
    custom_loss_seq_id: int
    name: str
    inputs: list[dict[str, Any]]
    graph: dict[str, Any]


class CreateModuleBody(Strict, frozen=True, kw_only=True):
    """POST gradserve/modules, msgpack. ``graph`` is the forward graph's text, ``weights`` a safetensors file."""

    session_id: str
    model_seq_id: int
    graph: str
    weights: bytes
    user_metadata: dict[str, Any] | None = None


class GraphBody(Strict, frozen=True, kw_only=True):
    """POST gradserve/graphs. ``graph`` is a graph's text."""

    graph: str


class ApplyBody(Strict, frozen=True, kw_only=True):
    """POST gradserve/apply, msgpack. ``graph`` is a kept graph's hash; ``arrays`` are its inputs."""

    model_id: str
    seq_id: int
    graph: str
    arrays: dict[str, Array]
    backward: bool = False


class StepBody(Strict, frozen=True, kw_only=True):
    """POST gradserve/optim_step: AdamW by ``adam``, Adam with ``coupled_decay`` as well, or SGD by ``sgd``."""

    model_id: str
    seq_id: int
    adam: AdamParams | None = None
    coupled_decay: bool = False
    sgd: SgdParams | None = None


class RolloutBody(Strict, frozen=True, kw_only=True):
    """POST gradserve/rollout. ``graph`` is the policy's hash."""

    model_id: str
    seq_id: int
    graph: str
    spec: RolloutSpec


class UpdateBody(Strict, frozen=True, kw_only=True):
    """POST gradserve/update. ``env`` is the one that the trajectories were made in; ``space`` its space of actions, if
    it is one that the server does not have."""

    model_id: str
    seq_id: int
    graph: str
    env: EnvSpec | None = None
    space: SpaceSpec | None = None
    config: PPOConfig
    seed: int | None = None


class TrajectoryBody(Strict, frozen=True, kw_only=True):
    """POST gradserve/trajectory, msgpack. ``trajectory`` is a safetensors file (docs/reference/control.md)."""

    model_id: str
    seq_id: int
    trajectory: bytes


class EvaluateBody(Strict, frozen=True, kw_only=True):
    """POST gradserve/evaluate."""

    model_id: str
    seq_id: int
    graph: str
    env: EnvSpec
    episodes: int
    seed: int | None = None
    deterministic: bool = True
    normalise_observations: bool = False
    clip_observation: float = 10.0


class TtlBody(Lenient, frozen=True):
    """PUT .../ttl. ``null`` removes the expiry; the field itself must be there."""

    ttl_seconds: int | None


class NameBody(Strict, frozen=True):
    """POST gradserve/runs/{id}/name. ``version`` null is the newest step; a string names a checkpoint of the run."""

    name: str = ""
    version: int | str | None = None
    ttl_seconds: int | None = None
    fork: bool = False


class RollbackBody(Strict, frozen=True, kw_only=True):
    """POST gradserve/runs/{id}/rollback. ``version`` is a number of optimizer steps or a checkpoint's name."""

    version: int | str
