"""The files of a checkpoint over HTTP, by the endpoints that the SDK's download uses."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gradserve.client.extensions import ExtensionError, call, detail

_PIECE = 1 << 20
_DIGEST = "sha-256=:"


def weights_info(url: str, path: str, api_key: str) -> dict[str, Any]:
    """base_model, is_lora, lora_rank, train_attn, train_mlp and train_unembed of a tinker:// path.

    Raises ExtensionError.
    """
    info: dict[str, Any] = json.loads(call(url, "weights_info", api_key, {"tinker_path": path}))
    return info


def weights(url: str, path: str, api_key: str, file: Path) -> str:
    """Download the weights of a tinker:// path to ``file``; returns the SHA-256 that the server says they have.

    Raises ExtensionError, also when the bytes that came have another.
    """
    (link,) = [link for name, link in _links(url, path, api_key).items() if name.endswith(".safetensors")]
    with _saying(f"the weights of {path}"):
        return _fetch(link, file)


def small_file(url: str, path: str, api_key: str, name: str) -> bytes:
    """A file beside the weights, adapter_config.json for one. Raises ExtensionError."""
    links = _links(url, path, api_key)
    if name not in links:
        raise ExtensionError(f"{path} has no file {name}", 404)
    with _saying(f"{name} of {path}"), urllib.request.urlopen(links[name], timeout=60) as response:
        content: bytes = response.read()
        return content


def _links(url: str, path: str, api_key: str) -> dict[str, str]:
    run_id, kind, name = path.removeprefix("tinker://").split("/")
    place = f"training_runs/{quote(run_id, safe=':')}/checkpoints/{kind}/{quote(name)}/external_weights_urls"
    urls: dict[str, str] = json.loads(call(url, place, api_key))["urls"]
    return urls


@contextlib.contextmanager
def _saying(what: str) -> Iterator[None]:
    """What goes wrong in a download, as ExtensionError."""
    try:
        yield
    except urllib.error.HTTPError as error:
        raise ExtensionError(f"the server answered {error.code}: {detail(error.read())}", error.code) from error
    except OSError as error:
        raise ExtensionError(f"{what} could not be fetched: {error}", None) from error


def _fetch(link: str, file: Path) -> str:
    found = hashlib.sha256()
    with urllib.request.urlopen(link, timeout=60) as response, open(file, "wb") as out:
        said = response.headers.get("Repr-Digest", "")
        while piece := response.read(_PIECE):
            found.update(piece)
            out.write(piece)
    if not said.startswith(_DIGEST):
        raise ExtensionError("the server does not say the digest of the weights: it is older than this client", None)
    promised = base64.b64decode(said.removeprefix(_DIGEST).rstrip(":")).hex()
    if found.hexdigest() != promised:
        raise ExtensionError(
            f"the weights are damaged: SHA-256 {found.hexdigest()} came, {promised} was promised. Try again.", None
        )
    return promised
