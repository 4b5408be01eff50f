"""The server's configuration: one frozen object, the only reader of the environment and of gradserve.toml.

Precedence: arguments, then GRADSERVE_* variables, then gradserve.toml in the working directory, then defaults.
"""

from __future__ import annotations

import hashlib
import os
from decimal import Context, Decimal, Inexact, InvalidOperation
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

KEY_PREFIX = "tml-"
"""The public SDK refuses keys without it before it sends anything."""


def default_data_dir() -> Path:
    """$XDG_DATA_HOME/gradserve or ~/.local/share/gradserve."""
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "gradserve"


_EXACT = Context(prec=100, traps=[Inexact, InvalidOperation])
"""Computes without rounding, or raises."""

_GIB = Decimal(1 << 30)


class Prices(BaseModel):
    """USD per million tokens by kind, per million environment steps, per hour of worker time, and per GiB and month of
    storage. Exact decimals."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train: Decimal = Decimal("0.40")
    prefill: Decimal = Decimal("0.10")
    cached: Decimal = Decimal("0.02")
    sample: Decimal = Decimal("0.30")
    env_step: Decimal = Decimal("0.10")
    compute_hour: Decimal = Decimal("0")
    storage_gib_month: Decimal = Field(Decimal("0"), ge=0, max_digits=30)

    def storage(self, size_bytes: int) -> Decimal:
        """USD that so many bytes cost in a month: bytes / 2^30 * price, with all digits (a 2^-30 has 30 of them)."""
        return _EXACT.normalize(_EXACT.multiply(_EXACT.divide(Decimal(size_bytes), _GIB), self.storage_gib_month))


class PriceSheet(BaseModel):
    """The default prices and those of single models."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    default: Prices = Prices()
    models: dict[str, Prices] = Field(default_factory=dict)

    def of(self, base: str) -> Prices:
        """The prices of one base model."""
        return self.models.get(base, self.default)

    @property
    def version(self) -> str:
        """A name for exactly these prices; every ledger line carries it."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]


class Settings(BaseSettings):
    """Everything that can be set. ``models`` maps names to a directory, a GGUF file, a package or ``hub:org/name``.

    Without ``models`` (None) the default one is offered where it is installed; an empty dict offers none.
    """

    model_config = SettingsConfigDict(
        env_prefix="GRADSERVE_",
        env_nested_delimiter="__",
        toml_file="gradserve.toml",
        frozen=True,
        extra="forbid",
    )

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    data_dir: Path = Field(default_factory=default_data_dir)
    models: dict[str, str] | None = None
    api_keys: tuple[str, ...] = ()
    archive_url: str | None = Field(
        None, description="a copy of durable arrays elsewhere: any fsspec URL, such as s3://bucket/prefix, of its own"
    )
    archive_options: dict[str, Any] = Field(
        default_factory=dict, description="arguments of the archive's fsspec file system; AWS_* variables count too"
    )

    workers: int = Field(1, ge=1)
    worker_threads: int = Field(
        default_factory=lambda: os.cpu_count() or 1, ge=1, description="of all workers; small models use one"
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    numerics: Literal["fast", "batch_invariant"] = "fast"
    task_tokens: int = Field(1024, ge=1, description="token budget of one training Task")
    merge_tokens: int = Field(512, ge=1, description="training Tasks share a pass up to so many tokens")
    pass_tokens: int = Field(1024, ge=1, description="token budget of one sampling pass")
    worker_memory_bytes: int | None = Field(
        None, ge=1, description="what a training pass may take above the weights; default: a share of what is free"
    )
    kv_cache_bytes: int = Field(2 << 30, ge=1 << 20)
    sampler: Literal["builtin", "vllm"] = Field("builtin", description="vllm: see docs/decisions/0007-vllm-backend.md")
    task_attempts: int = Field(3, ge=1, description="worker deaths an Op survives")
    worker_silence_s: float = Field(60.0, gt=0, description="no pong for so long: killed")

    durable_every_steps: int = Field(1000, ge=1, description="optimizer steps between durable versions of a run")
    durable_every_s: float = Field(60.0, gt=0, description="seconds after which a new step is made durable")
    durable_replay_s: float = Field(30.0, gt=0, description="the same by what computing again would take a worker")
    keep_versions: int = Field(5, ge=1, description="durable versions kept per run, besides named checkpoints")
    finished_ttl_s: float = Field(7 * 24 * 3600.0, gt=0, description="how long those of a finished session are kept")

    long_poll_s: float = Field(30.0, gt=0, le=40)
    result_ttl_s: float = Field(24 * 3600.0, gt=0)
    max_lora_rank: int = Field(256, ge=1)
    max_body_bytes: int = Field(256 << 20, ge=1 << 10)
    prices: PriceSheet = PriceSheet()

    @field_validator("api_keys")
    @classmethod
    def _keys_have_the_prefix(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        for key in keys:
            if not key.startswith(KEY_PREFIX) or len(key) < len(KEY_PREFIX) + 16:
                raise ValueError(f"each key must start with {KEY_PREFIX!r} and have at least 16 characters after it")
        return keys

    @model_validator(mode="after")
    def _modes_fit_together(self) -> Settings:
        if self.sampler == "vllm" and self.dtype != "float32":
            raise ValueError('sampler "vllm" is compared with the trainer in float32: leave dtype at "float32"')
        if self.numerics != "batch_invariant":
            return self
        if self.sampler == "vllm":
            raise ValueError('numerics "batch_invariant" is a promise of the built-in sampler: leave sampler unset')
        if self.device == "cuda" or self.dtype not in ("auto", "float32"):
            raise ValueError('numerics "batch_invariant" computes in float32 on the CPU: leave device and dtype unset')
        if "worker_threads" in self.model_fields_set and self.worker_threads > self.workers:
            raise ValueError(
                'numerics "batch_invariant" computes on one thread per worker: '
                f"set workers = {self.worker_threads} to use {self.worker_threads} threads"
            )
        return self

    @property
    def threads_per_worker(self) -> int:
        """``worker_threads`` are shared by all workers."""
        return 1 if self.numerics == "batch_invariant" else max(1, self.worker_threads // self.workers)

    @property
    def tokens_per_task(self) -> int:
        """Where the Tasks of an Op are cut. 0: after every row, so that no sum depends on where the cuts are."""
        return 0 if self.numerics == "batch_invariant" else self.task_tokens

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)
