"""Files encrypted with age (age-encryption.org/v1) to public keys that the caller names, through ``pyrage``."""

from __future__ import annotations

import importlib
import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from gradserve.compute.files import whole_file

SUFFIX = ".age"
INSTALL = "pip install 'gradserve[age]'"

_SSH = ("ssh-ed25519 ", "ssh-rsa ")


class BadRecipient(ValueError):
    """Not a public key that files can be encrypted to; the message says what one looks like, and not what was given."""


def is_installed() -> bool:
    """Whether this server can encrypt."""
    return importlib.util.find_spec("pyrage") is not None


def parse_recipient(text: str) -> Any:
    """A recipient as pyrage has it: native X25519 (``age1...``), or an SSH public key of type ed25519 or rsa.

    Raises BadRecipient.
    """
    if len(text.splitlines()) > 1:
        raise BadRecipient("This is more than one line; name one recipient per entry.")
    pyrage = importlib.import_module("pyrage")
    kind = pyrage.ssh.Recipient if text.startswith(_SSH) else pyrage.x25519.Recipient
    try:
        return kind.from_str(text)
    except pyrage.RecipientError as error:
        # The text is not repeated: it may be the secret half.
        raise BadRecipient(
            f"This is not an age recipient ({error}). One is age1... as age-keygen prints it, or the public half of an "
            "SSH key: ssh-ed25519 ... or ssh-rsa ..."
        ) from error


def encrypt_file(plain: Path | bytes, target: Path, recipients: Sequence[str]) -> None:
    """Write a file (or bytes), encrypted to all ``recipients``, as ``target``: whole or not at all, in a stream.

    Raises BadRecipient, NoRoom.
    """
    pyrage = importlib.import_module("pyrage")
    parsed = [parse_recipient(recipient) for recipient in recipients]
    with io.BytesIO(plain) if isinstance(plain, bytes) else open(plain, "rb") as source, whole_file(target) as file:
        sink = _Sink(file)
        try:
            pyrage.encrypt_io(source, sink, parsed)
        except pyrage.EncryptError as error:
            raise sink.error or error from error


class _Sink:
    """Keeps the error of a write, of which pyrage passes on only the text."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()
