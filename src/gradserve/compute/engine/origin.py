"""Which weights an object was computed from. It is written into the object, so into its digest, and read with it.

A gradient belongs to the weights at which it was taken, moments to the weights that were made together with them. Used
with any others they would give a wrong step without an error.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

_KEY = "origin"
"""One key for all: safetensors writes several in an order that changes from one call to the next."""


class Origin(msgspec.Struct, frozen=True, omit_defaults=True):
    """The digest of the weights, and for a gradient the name of the base that they sat on."""

    weights: str
    base: str | None = None

    def metadata(self) -> dict[str, str]:
        """For the header of a safetensors file; the same bytes every time."""
        return {_KEY: msgspec.json.encode(self).decode()}

    @staticmethod
    def of(metadata: dict[str, str] | None) -> Origin | None:
        """The inverse; None for an object without one (weights)."""
        text = (metadata or {}).get(_KEY)
        return None if text is None else msgspec.json.decode(text, type=Origin)


class WrongOrigin(Exception):
    """Arrays were given to a Task that belong to other weights than its own."""


def common(origins: Iterable[Origin | None]) -> Origin | None:
    """What all share; None when there are none. Raises WrongOrigin when they differ or one has no origin."""
    different = set(origins)
    if len(different) > 1 or different == {None}:
        raise WrongOrigin(f"these gradients were not all taken at the same weights: {_names(different)}")
    return next(iter(different), None)


def require(origin: Origin | None, weights: str, what: str) -> None:
    """Raises WrongOrigin unless ``what`` belongs to ``weights``."""
    if origin is None or origin.weights != weights:
        raise WrongOrigin(f"{what} belongs to weights {_names({origin})}, not to {weights}")


def _names(origins: set[Origin | None]) -> str:
    return ", ".join(sorted("unknown" if origin is None else origin.weights for origin in origins))
