"""Checks of age recipients."""

from __future__ import annotations

from gradserve.compute.encryption import INSTALL, BadRecipient, is_installed, parse_recipient
from gradserve.store.base import AGE_RECIPIENTS
from gradserve.wire.errors import Invalid, Unsupported

_FIELD = "age_encryption_recipients"
_MOST = 10


def age_recipients(given: list[str] | None) -> dict[str, str]:
    """User metadata that remembers the recipients of a save; {} when none are asked for.

    Raises Unsupported without pyrage; Invalid for what is not a recipient, for more than ten, and for an empty list,
    which might have been meant to encrypt.
    """
    if given is None:
        return {}
    if not is_installed():
        raise Unsupported(
            "unsupported.age_encryption",
            "This server can't encrypt files with age: pyrage is not installed.",
            field=_FIELD,
            fix=f"Its operator may run {INSTALL}; or leave the field out and download over TLS.",
        )
    if not 1 <= len(given) <= _MOST:
        raise Invalid(
            "weights.recipients",
            f"{_FIELD} has {len(given)} entries.",
            field=_FIELD,
            fix=f"Name 1 to {_MOST} recipients, or leave the field out for plain files.",
        )
    recipients = [entry.strip() for entry in given]  # read from a .pub file they end in a line break
    for index, recipient in enumerate(recipients):
        try:
            parse_recipient(recipient)
        except BadRecipient as error:
            raise Invalid("weights.recipient", str(error), field=_FIELD, index=index) from error
    return {AGE_RECIPIENTS: "\n".join(recipients)}
