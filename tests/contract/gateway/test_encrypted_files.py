"""External weights that go out encrypted with age, and downloads in parts. pyrage's own decryption is the judge."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import IO, Any

import pyrage
import pytest

from gradserve.compute.encryption import _Sink, encrypt_file
from gradserve.compute.files import NoRoom
from tests.contract.gateway.gate import Gate, nobody_mends, opened, problem

SSH = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPOZ4qvroXTSFgiWXa/o6QFbb4J0huqIe2zEhHvpTHhU a comment"


@pytest.fixture
def identity() -> Any:
    return pyrage.x25519.Identity.generate()


def urls_of(gate: Gate, run: str, name: str = "e", kind: str = "external_weights") -> dict[str, str]:
    answer = gate.get(f"training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls")
    assert answer.status_code == 200, answer.text
    urls: dict[str, str] = answer.json()["urls"]
    return urls


def decrypted(data: bytes, identity: Any) -> bytes:
    plain: bytes = pyrage.decrypt(data, [identity])
    return plain


def test_every_file_is_encrypted_to_every_recipient(gate: Gate, identity: Any) -> None:
    other = pyrage.x25519.Identity.generate()
    run = gate.run()
    recipients = [str(identity.to_public()), f"{other.to_public()}\n", SSH]
    checkpoint = gate.save(run, 1, "e", "external_weights", age_encryption_recipients=recipients)
    weights = gate.objects.path(checkpoint.weights).read_bytes()
    urls = urls_of(gate, run)
    assert set(urls) == {"adapter_config.json.age", "adapter_model.safetensors.age"}
    sent = gate.client.get(urls["adapter_model.safetensors.age"]).content
    assert weights not in sent
    for key in (identity, other):
        assert decrypted(sent, key) == weights
        config = json.loads(decrypted(gate.client.get(urls["adapter_config.json.age"]).content, key))
        assert config["peft_type"] == "LORA"
    with pytest.raises(pyrage.DecryptError):
        decrypted(sent, pyrage.x25519.Identity.generate())
    assert gate.objects.path(checkpoint.weights).read_bytes() == weights, "stored objects stay as they are"


def test_no_link_leads_to_a_plain_file(gate: Gate, identity: Any) -> None:
    run = gate.run()
    gate.save(run, 1, "e", "external_weights", age_encryption_recipients=[str(identity.to_public())])
    for name, url in urls_of(gate, run).items():
        answer = gate.client.get(url.replace(name, name.removesuffix(".age")))
        assert (answer.status_code, problem(answer)["code"]) == (404, "file.unknown")
    strange = urls_of(gate, run)["adapter_config.json.age"].replace("adapter_config.json", "..%2F..%2Fgradserve.db")
    assert gate.client.get(strange).status_code == 404


def test_the_same_bytes_every_time_so_that_a_download_can_go_on(gate: Gate, identity: Any) -> None:
    """Encrypting again would give other bytes: each file has a key of its own."""
    run = gate.run()
    checkpoint = gate.save(run, 1, "e", "external_weights", age_encryption_recipients=[str(identity.to_public())])
    url = urls_of(gate, run)["adapter_model.safetensors.age"]
    got: list[bytes] = []
    readers = [threading.Thread(target=lambda: got.append(gate.client.get(url).content)) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert len(set(got)) == 1
    first = gate.client.get(url, headers={"Range": "bytes=0-99"})
    rest = gate.client.get(url, headers={"Range": "bytes=100-", "If-Range": first.headers["etag"]})
    assert (first.status_code, rest.status_code) == (206, 206)
    assert decrypted(first.content + rest.content, identity) == gate.objects.path(checkpoint.weights).read_bytes()


def test_ranges(gate: Gate, identity: Any) -> None:
    run = gate.run()
    gate.save(run, 1, "plain", "external_weights")
    gate.save(run, 2, "secret", "external_weights", age_encryption_recipients=[str(identity.to_public())])
    plain = urls_of(gate, run, "plain")["adapter_model.safetensors"]
    for url in (plain, urls_of(gate, run, "secret")["adapter_model.safetensors.age"]):
        whole = gate.client.get(url)
        size = len(whole.content)
        assert (whole.status_code, whole.headers["accept-ranges"]) == (200, "bytes")
        for asked, start, end in (
            ("2-4", 2, 4),
            ("5-", 5, size - 1),
            ("-3", size - 3, size - 1),
            ("0-999999", 0, size - 1),
        ):
            part = gate.client.get(url, headers={"Range": f"bytes={asked}"})
            assert (part.status_code, part.content) == (206, whole.content[start : end + 1])
            assert part.headers["content-range"] == f"bytes {start}-{end}/{size}"
            assert part.headers["content-length"] == str(end - start + 1)
        beyond = gate.client.get(url, headers={"Range": f"bytes={size}-"})
        assert (beyond.status_code, beyond.headers["content-range"]) == (416, f"bytes */{size}")
        changed = gate.client.get(url, headers={"Range": "bytes=2-4", "If-Range": '"another"'})
        assert (changed.status_code, changed.content) == (200, whole.content)


def test_a_download_goes_on_after_the_file_moved_to_the_other_tier(gate: Gate) -> None:
    run = gate.run()
    checkpoint = gate.save(run, 1, "e", "external_weights")
    url = urls_of(gate, run)["adapter_model.safetensors"]
    first = gate.client.get(url, headers={"Range": "bytes=0-3"})
    whole = gate.objects.path(checkpoint.weights).read_bytes()
    gate.objects.demote(checkpoint.weights)
    os.utime(gate.objects.path(checkpoint.weights), (1, 1))
    rest = gate.client.get(url, headers={"Range": "bytes=4-", "If-Range": first.headers["etag"]})
    assert (rest.status_code, first.content + rest.content) == (206, whole)


@pytest.mark.parametrize(
    ("recipients", "code", "index"),
    [
        (["age1xyz"], "weights.recipient", 0),
        ([SSH, "ssh-ed25519 AAAA"], "weights.recipient", 1),
        (["ecdsa-sha2-nistp256 AAAAE2VjZHNhLXNoYTItbmlzdHAyNTY="], "weights.recipient", 0),
        ([""], "weights.recipient", 0),
        ([f"{SSH}\nage1"], "weights.recipient", 0),
        ([SSH] * 11, "weights.recipients", None),
        ([], "weights.recipients", None),
    ],
)
def test_recipients_are_checked_at_once(gate: Gate, recipients: list[str], code: str, index: int | None) -> None:
    run = gate.run()
    answer = gate.post("save_weights_external", model_id=run, path="e", seq_id=1, age_encryption_recipients=recipients)
    said = problem(answer)
    assert (said["status"], said["code"], said["field"]) == (400, code, "age_encryption_recipients")
    assert said.get("index") == index


def test_a_secret_key_is_no_recipient_and_is_not_repeated(gate: Gate, identity: Any) -> None:
    run = gate.run()
    answer = gate.post(
        "save_weights_external", model_id=run, path="e", seq_id=1, age_encryption_recipients=[str(identity)]
    )
    assert problem(answer)["code"] == "weights.recipient"
    assert str(identity) not in answer.text


def test_a_server_without_pyrage_says_what_to_install(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradserve.gateway.validate.age.is_installed", lambda: False)
    run = gate.run()
    answer = gate.post("save_weights_external", model_id=run, path="e", seq_id=1, age_encryption_recipients=[SSH])
    said = problem(answer)
    assert said["code"] == "unsupported.age_encryption"
    assert "pip install 'gradserve[age]'" in said["detail"]


def test_metadata_of_a_training_save_does_not_make_its_files_encrypted(gate: Gate) -> None:
    run = gate.run()
    gate.save(run, 1, "w", user_metadata={"gradserve.age_recipients": SSH})
    assert set(urls_of(gate, run, "w", "weights")) == {"adapter_config.json", "adapter_model.safetensors"}


def test_damaged_weights_are_not_encrypted(tmp_path: Path, identity: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as gate:
        nobody_mends(gate, monkeypatch)
        run = gate.run()
        checkpoint = gate.save(run, 1, "e", "external_weights", age_encryption_recipients=[str(identity.to_public())])
        gate.objects.path(checkpoint.weights).write_bytes(b"something else")
        answer = gate.client.get(urls_of(gate, run)["adapter_model.safetensors.age"])
        assert (answer.status_code, problem(answer)["code"]) == (500, "checkpoint.corrupt")
        assert list(tmp_path.rglob("*.age")) == []


class Full:
    """A file on a disk that fills up while it is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._room = 100_000

    def write(self, data: bytes) -> int:
        self._room -= len(data)
        if self._room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._file.write(data)


def test_a_full_disk_leaves_no_half_encrypted_file(
    tmp_path: Path, identity: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradserve.compute.encryption._Sink", lambda file: _Sink(Full(file)))  # type: ignore[arg-type]
    with pytest.raises(NoRoom, match="no room left"):
        encrypt_file(b"x" * 200_000, tmp_path / "x.age", [str(identity.to_public())])
    assert list(tmp_path.iterdir()) == []
