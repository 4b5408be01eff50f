"""Which base model weights were trained on: its name may be given to another one, its bytes may not."""

from __future__ import annotations

import msgspec

from gradserve.wire.errors import Invalid

RESERVED = "gradserve."
"""Keys of user metadata that begin with this are the server's own: they are in the store and in no answer."""

_WEIGHTS = RESERVED + "base_sha256"
_TOKENIZER = RESERVED + "tokenizer_sha256"


class BaseIdentity(msgspec.Struct, frozen=True):
    """SHA-256 over a base model's weights and config, and over its tokenizer (compute/identity.py says of what)."""

    weights: str
    tokenizer: str

    def as_metadata(self) -> dict[str, str]:
        """How the store keeps it with a run, or with a checkpoint that no run made."""
        return {_WEIGHTS: self.weights, _TOKENIZER: self.tokenizer}

    @staticmethod
    def of_metadata(metadata: dict[str, str]) -> BaseIdentity | None:
        """What ``as_metadata`` wrote; None where nothing was written (for modules, and by servers that did not)."""
        if _WEIGHTS not in metadata:
            return None
        return BaseIdentity(metadata[_WEIGHTS], metadata.get(_TOKENIZER, ""))


def without_reserved(metadata: dict[str, str]) -> dict[str, str]:
    """What the client gave."""
    return {key: value for key, value in metadata.items() if not key.startswith(RESERVED)}


def require_same_base(what: str, base: str, trained_on: BaseIdentity | None, served: BaseIdentity | None) -> None:
    """Raises Invalid when ``what`` was trained on other weights than those that are ``served`` as ``base``.

    Nothing is known to differ where either is None.
    """
    if trained_on is None or served is None or trained_on.weights == served.weights:
        return
    raise Invalid(
        "base.differs",
        f"{what} was trained on a base model {base!r} with the SHA-256 {trained_on.weights}; the one offered here "
        f"under that name has {served.weights}. Nothing was computed, and nothing of it is lost.",
        field="base_model",
        fix=f"Offer the model that it was trained on as {base!r} (gradserve serve --model {base}=SOURCE), or start a "
        "new run on this one.",
    )
