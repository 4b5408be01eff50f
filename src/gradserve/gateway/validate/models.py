"""Checks of models, adapters, optimizers, names and checkpoint paths."""

from __future__ import annotations

import hashlib
import math
import re
from typing import Any

import msgspec

from gradserve.compute.catalog import BaseFacts, Catalog
from gradserve.gateway.bodies import LoraBody
from gradserve.wire.errors import Invalid, NotFound, Unsupported
from gradserve.wire.ops import AdamParams, LoraConfig, SgdParams, module_graph

MAX_SEQ = 2**63 - 1
MIN_TTL_S = 3600
MAX_TTL_S = 10 * 365 * 24 * 3600
KINDS = ("weights", "sampler_weights", "external_weights")

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@:,~-]{0,127}")


class CheckpointPath(msgspec.Struct, frozen=True):
    """tinker://<run_id>/<kind>/<name>"""

    run_id: str
    kind: str
    name: str


def parse_path(path: str, field: str) -> CheckpointPath:
    """The parts of a checkpoint's path. Raises Invalid."""
    scheme, _, rest = path.partition("://")
    parts = rest.split("/")
    if scheme != "tinker" or len(parts) != 3 or not all(parts) or parts[1] not in KINDS:
        raise Invalid(
            "checkpoint.path",
            f"{field} is {path!r}.",
            field=field,
            fix=f"A path has the form tinker://<run>/<kind>/<name> with kind one of {', '.join(KINDS)}.",
        )
    return CheckpointPath(*parts)


def unknown_checkpoint(path: str, field: str | None) -> NotFound:
    """The answer for a path that does not exist, has expired or is another tenant's."""
    return NotFound(
        "checkpoint.unknown",
        f"There is no checkpoint {path}: it was never saved, was deleted, has expired or belongs to somebody else.",
        field=field,
    )


def known_model(catalog: Catalog, name: str, field: str = "base_model") -> BaseFacts:
    """The facts of a base model. Raises NotFound listing the ones offered."""
    facts = catalog.get(name)
    if facts is None and module_graph(name) is not None:
        raise Invalid(
            "model.module",
            "This run trains a module, not a language model.",
            field=field,
            fix="Modules are run by gradserve/apply, gradserve/rollout and their like (gradserve.ModuleClient).",
        )
    if facts is None:
        raise NotFound(
            "model.unknown",
            f"This server does not offer the base model {name!r}.",
            field=field,
            fix=f"Offered: {', '.join(catalog.names()) or 'none'}.",
        )
    return facts


def sequence(value: int, field: str, least: int) -> int:
    """A counter that the client keeps. Raises Invalid outside [least, 2^63)."""
    if not least <= value <= MAX_SEQ:
        raise Invalid("seq.range", f"{field} is {value}; it must be at least {least}.", field=field)
    return value


def drawn_seed(scope: str, seq: int) -> int:
    """The seed of a request that brings none: the same for every replay of it."""
    return int.from_bytes(hashlib.sha256(f"{scope}:{seq}".encode()).digest()[:8], "big") >> 1


def seed_or_drawn(seed: int | None, field: str, scope: str, seq: int) -> int:
    """The client's seed, or one that follows from the request's identity."""
    if seed is None:
        return drawn_seed(scope, seq)
    if not 0 <= seed < 2**63:
        raise Invalid("seed.range", f"{field} is {seed}; it must be in [0, 2^63).", field=field)
    return seed


def lora_config(lora: LoraBody | None, max_rank: int, run_id: str, *, value_head: bool = False) -> LoraConfig:
    """The adapters of a new run. Raises Invalid or Unsupported."""
    if lora is None:
        raise Unsupported(
            "unsupported.full_finetuning",
            "There is no lora_config.",
            field="lora_config",
            fix='Send lora_config with a rank, or gradserve: {"parameters": "full"} to train all parameters.',
        )
    if not 1 <= lora.rank <= max_rank:
        raise Invalid(
            "lora.rank",
            f"lora_config.rank is {lora.rank}; this server takes 1 to {max_rank}.",
            field="lora_config.rank",
        )
    if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
        raise Invalid(
            "lora.nothing_to_train",
            "train_attn, train_mlp and train_unembed are all false.",
            field="lora_config",
            fix="Switch on at least one.",
        )
    seed = seed_or_drawn(lora.seed, "lora_config.seed", run_id, 0)
    return LoraConfig(lora.rank, seed, lora.train_attn, lora.train_mlp, lora.train_unembed, value_head)


def only_adamw(config: dict[str, Any] | None, field: str) -> None:
    """Refuse every optimizer but AdamW."""
    if config is not None and config.get("type", "adamw") != "adamw":
        raise Unsupported(
            "unsupported.optimizer",
            f"{field} asks for {config.get('type')!r}.",
            field=field,
            fix="This server has adamw.",
        )


def adam_params(adam: AdamParams | None, *, optional: bool = False) -> AdamParams:
    """The parameters of a step; with ``optional`` the defaults when there are none. Raises Invalid."""
    if adam is None and optional:
        return AdamParams()
    if adam is None:
        raise Invalid("body.missing_field", "adam_params is missing.", field="adam_params")
    for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
        value = getattr(adam, name)
        if not math.isfinite(value) or value < 0:
            raise _bad_adam(name, value, "a finite number, at least 0")
    for name in ("beta1", "beta2"):
        value = getattr(adam, name)
        if not 0 <= value < 1:
            raise _bad_adam(name, value, "in [0, 1)")
    return adam


def sgd_params(sgd: SgdParams) -> SgdParams:
    """The parameters of a step by SGD. Raises Invalid."""
    for name in ("learning_rate", "momentum", "dampening", "weight_decay", "grad_clip_norm"):
        value = getattr(sgd, name)
        if not math.isfinite(value) or value < 0:
            field = f"sgd.{name}"
            raise Invalid("optim.range", f"{field} is {value}; it must be a finite number, at least 0.", field=field)
    if sgd.nesterov and (sgd.momentum == 0 or sgd.dampening != 0):
        raise Invalid("optim.nesterov", "nesterov needs momentum, and no dampening.", field="sgd.nesterov")
    return sgd


def _bad_adam(name: str, value: float, bound: str) -> Invalid:
    field = f"adam_params.{name}"
    return Invalid("optim.range", f"{field} is {value}; it must be {bound}.", field=field)


def checkpoint_name(name: str | None, field: str = "path") -> str:
    """The last part of a checkpoint's path. Raises Invalid."""
    if name is None or not _NAME.fullmatch(name):
        raise Invalid(
            "checkpoint.name",
            f"{field} is {name!r}.",
            field=field,
            fix="A name has 1 to 128 letters, digits or ._+=@:,~- and starts with a letter, a digit or _.",
        )
    return name


def ttl(seconds: int | None) -> int | None:
    """The life of a checkpoint. Raises Invalid outside one hour to ten years."""
    if seconds is not None and not MIN_TTL_S <= seconds <= MAX_TTL_S:
        raise Invalid(
            "checkpoint.ttl",
            f"ttl_seconds is {seconds}; it must be null or in [{MIN_TTL_S}, {MAX_TTL_S}] (an hour to ten years).",
            field="ttl_seconds",
        )
    return seconds


def metadata(given: dict[str, Any] | None) -> dict[str, str]:
    """User metadata with every value a string: the protocol answers it so, whatever was sent."""
    return {
        key: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for key, value in (given or {}).items()
    }
