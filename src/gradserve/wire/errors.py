"""Errors that a client sees.

    GradserveError
    ├── UserError            the caller can mend it (4xx)
    │   ├── Invalid          400  a field is wrong
    │   ├── Unauthenticated  401
    │   ├── Forbidden        403
    │   ├── NotFound         404
    │   ├── Conflict         409
    │   ├── Gone             410
    │   ├── Unsupported      400  a known feature that this server does not have
    │   └── NotServed        501  a known endpoint that this server does not have
    └── ServerError          500  ours to mend; safe to send again

Every one becomes a problem document (RFC 9457) with ``code``, ``field``, ``index`` and ``fix``.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import ClassVar

import msgspec


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """A problem document (RFC 9457). ``index`` is the row or list position that is wrong, ``fix`` how to mend it."""

    status: int
    code: str
    title: str
    detail: str
    field: str | None = None
    index: int | None = None
    fix: str | None = None
    type: str = "about:blank"


class GradserveError(Exception):
    """Base of everything that is shown to a client.

    ``code`` is stable and machine-readable (frozen by a test), ``detail`` says what is wrong with the value seen,
    ``field`` where, ``index`` in which row, ``fix`` what to send instead.
    """

    status: ClassVar[int] = 500

    def __init__(
        self,
        code: str,
        detail: str,
        *,
        field: str | None = None,
        index: int | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.field = field
        self.index = index
        self.fix = fix

    def problem(self) -> Problem:
        """The document that goes on the wire; ``detail`` ends with the cure, since clients print that field."""
        detail = self.detail if self.fix is None else f"{self.detail} {self.fix}"
        return Problem(
            status=self.status,
            code=self.code,
            title=HTTPStatus(self.status).phrase,
            detail=detail,
            field=self.field,
            index=self.index,
            fix=self.fix,
        )


class UserError(GradserveError):
    """The caller can mend it."""

    status = 400


class Invalid(UserError):
    """A field of the request is wrong."""

    status = 400


class Unauthenticated(UserError):
    """No key, or one that this server does not know."""

    status = 401


class Forbidden(UserError):
    """A valid key that may not do this."""

    status = 403


class NotFound(UserError):
    """No such run, checkpoint, session, model or future, or it belongs to another tenant."""

    status = 404


class Conflict(UserError):
    """Not now: something else is going on with it."""

    status = 409


class Gone(UserError):
    """It existed and was finished, deleted or has expired."""

    status = 410


class Unsupported(UserError):
    """Part of the protocol that this server does not have (yet).

    Not 501: the public client repeats every 5xx for five minutes before it shows it.
    """

    status = 400


class NotServed(UserError):
    """An endpoint of the protocol that this server does not have (yet); see gateway/routes/unserved.py."""

    status = 501


class ServerError(GradserveError):
    """Ours to mend."""

    status = 500
