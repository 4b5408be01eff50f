"""The digests of a base model's files.

``weights`` covers names and contents of all safetensors files, and the config but for what says who wrote it: a GGUF
file that is converted again, by another version of transformers, is the same model. ``tokenizer`` covers the names and
contents of the tokenizer's files.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

import msgspec

from gradserve.compute.files import sha256_of, whole_file
from gradserve.wire.identity import BaseIdentity

log = logging.getLogger(__name__)

_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template*")
_SAYS_WHO_WROTE_IT = ("transformers_version", "_name_or_path")


class _Known(msgspec.Struct, frozen=True):
    """A file that was read: size, time of change in ns, digest. As long as the first two stay it is not read again."""

    size: int
    mtime_ns: int
    sha256: str


def identify(folder: Path, notes: Path | None = None) -> BaseIdentity | None:
    """The digests of the model in ``folder``; None when there is none.

    Reads every byte, once: what it found is written to the file ``notes``, for the next start.
    """
    config = folder / "config.json"
    if not config.is_file():
        return None
    known = _read(notes)
    found = dict(known)
    weights = {file.name: _digest(file, found) for file in folder.glob("*.safetensors")}
    tokenizer = {file.name: _digest(file, found) for pattern in _TOKENIZER for file in folder.glob(pattern)}
    if notes is not None and found != known:
        _write(notes, found)
    return BaseIdentity(_over(weights | {config.name: _config_digest(config)}), _over(tokenizer))


def _digest(file: Path, known: dict[str, _Known]) -> str:
    stat, path = file.stat(), str(file.resolve())
    noted = known.get(path)
    if noted is None or (noted.size, noted.mtime_ns) != (stat.st_size, stat.st_mtime_ns):
        noted = known[path] = _Known(stat.st_size, stat.st_mtime_ns, sha256_of(file))
    return noted.sha256


def _config_digest(file: Path) -> str:
    config = {key: value for key, value in json.loads(file.read_text()).items() if key not in _SAYS_WHO_WROTE_IT}
    return hashlib.sha256(msgspec.json.encode(config, order="sorted")).hexdigest()


def _over(digests: dict[str, str]) -> str:
    return hashlib.sha256("".join(f"{name}:{digests[name]}\n" for name in sorted(digests)).encode()).hexdigest()


def _read(notes: Path | None) -> dict[str, _Known]:
    if notes is None or not notes.is_file():
        return {}
    try:
        return msgspec.json.decode(notes.read_bytes(), type=dict[str, _Known])
    except (msgspec.MsgspecError, OSError) as error:
        log.warning("%s can't be read (%s): the models' files are read again", notes, error)
        return {}


def _write(notes: Path, found: dict[str, _Known]) -> None:
    try:
        notes.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(notes, durable=False) as file:
            file.write(msgspec.json.encode(found))
    except OSError as error:
        log.warning("%s can't be written (%s): the next start reads the models' files again", notes, error)
