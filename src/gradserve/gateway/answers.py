"""The nouns of the store as the protocol shows them, and pages of them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from gradserve.store.base import Checkpoint, Page, Run
from gradserve.wire.errors import Invalid
from gradserve.wire.identity import without_reserved

_CHECKPOINT_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_MAX_PAGE = 1000


class CheckpointAnswer(msgspec.Struct, frozen=True):
    """A checkpoint."""

    checkpoint_id: str
    checkpoint_type: str
    time: datetime
    tinker_path: str
    size_bytes: int
    public: bool
    user_metadata: dict[str, str]
    expires_at: datetime | None


class RunAnswer(msgspec.Struct, frozen=True):
    """A training run."""

    training_run_id: str
    base_model: str
    model_owner: str
    lora_rank: int | None
    corrupted: bool
    last_request_time: datetime
    last_checkpoint: CheckpointAnswer | None
    last_sampler_checkpoint: CheckpointAnswer | None
    user_metadata: dict[str, str]
    is_lora: bool


class Cursor(msgspec.Struct, frozen=True):
    """Where a page lies in the whole."""

    offset: int
    limit: int
    total_count: int


def utc(seconds: float) -> datetime:
    """Seconds since the epoch as a time that says its zone."""
    return datetime.fromtimestamp(seconds, UTC)


def checkpoint_answer(checkpoint: Checkpoint) -> CheckpointAnswer:
    """A stored checkpoint as the protocol shows it."""
    return CheckpointAnswer(
        checkpoint_id=f"{checkpoint.kind}/{checkpoint.name}",
        checkpoint_type=_CHECKPOINT_TYPES[checkpoint.kind],
        time=utc(checkpoint.created_at),
        tinker_path=checkpoint.path,
        size_bytes=checkpoint.size_bytes,
        public=checkpoint.public,
        user_metadata=without_reserved(checkpoint.user_metadata),
        expires_at=None if checkpoint.expires_at is None else utc(checkpoint.expires_at),
    )


def run_answer(run: Run, newest_first: list[Checkpoint]) -> RunAnswer:
    """A stored run as the protocol shows it, with its newest checkpoint of either kind."""
    latest = {c.kind: checkpoint_answer(c) for c in reversed(newest_first)}
    return RunAnswer(
        training_run_id=run.id,
        base_model=run.base,
        model_owner=run.tenant,
        lora_rank=run.lora.rank if run.lora else None,
        corrupted=run.corrupted,
        last_request_time=utc(run.last_request_at),
        last_checkpoint=latest.get("weights"),
        last_sampler_checkpoint=latest.get("sampler_weights"),
        user_metadata=without_reserved(run.user_metadata),
        is_lora=run.lora is not None,
    )


def cursor(page: Page) -> Cursor:
    """A store's page as the protocol shows it."""
    return Cursor(page.offset, page.limit, page.total)


def page_of(query: Mapping[str, str], default_limit: int) -> tuple[int, int]:
    """(limit, offset) of a listing. Raises Invalid."""
    return number_of(query, "limit", default_limit, 1, _MAX_PAGE), number_of(query, "offset", 0, 0, 2**62)


def number_of(query: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    """A whole number of the query string. Raises Invalid."""
    text = query.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise Invalid("query.range", f"{name} is {text!r}; it must be {least} to {most}.", field=name)
    return int(text)
