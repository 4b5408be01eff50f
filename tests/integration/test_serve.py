"""``gradserve serve`` as a user meets it in a terminal."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.processes import serve_on, stop

SECRET = "tml-0123456789abcdefghij"


def gradserve(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gradserve", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
        check=False,
    )


def test_it_says_where_it_is_and_what_to_export(tiny_models: dict[str, str], data_dir: Path) -> None:
    command = [sys.executable, "-m", "gradserve", "serve", "--port", "0", "--data-dir", str(data_dir)]
    command += ["--model", f"a={tiny_models['tiny']}", "--model", f"b/c={tiny_models['tiny-qwen']}"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    first, second = server.stdout.readline(), server.stdout.readline()
    server.send_signal(signal.SIGINT)
    rest = server.stdout.read()
    server.wait(30)
    found = re.fullmatch(r"gradserve: (http://127\.0\.0\.1:\d+) serves a, b/c\n", first)
    assert found is not None, first
    assert second == f"  export TINKER_BASE_URL={found[1]} TINKER_API_KEY=tml-local\n"
    assert "Traceback" not in rest


def test_other_addresses_need_a_key(data_dir: Path) -> None:
    refused = gradserve("serve", "--host", "0.0.0.0", "--data-dir", str(data_dir))
    assert refused.returncode == 1
    assert "GRADSERVE_API_KEYS" in refused.stderr
    weak = gradserve("serve", "--data-dir", str(data_dir), GRADSERVE_API_KEYS='["secret"]')
    assert weak.returncode == 1
    assert "must start with 'tml-'" in weak.stderr


def test_a_configured_key_is_needed_and_others_are_refused(tiny_models: dict[str, str], data_dir: Path) -> None:
    port, server = serve_on({"tiny": tiny_models["tiny"]}, data_dir, GRADSERVE_API_KEYS=f'["{SECRET}"]')
    try:
        url = f"http://127.0.0.1:{port}/api/v1/get_server_capabilities"
        assert httpx.get(url).status_code == 401
        assert httpx.get(url, headers={"X-API-Key": "tml-anything"}).status_code == 401
        assert httpx.get(url, headers={"X-API-Key": SECRET}).status_code == 200
    finally:
        stop(server)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("x=/nowhere", "neither a directory, a .gguf file nor an installed package"),
        ("x=numpy", "carries 0 .gguf files"),
        ("x", "not NAME=SOURCE"),
        ("-x=/tmp", "is not usable"),
        ("x=" + str(Path(__file__).parent), "has no config.json"),
    ],
)
def test_a_model_that_cannot_be_served(model: str, says: str, data_dir: Path) -> None:
    refused = gradserve("serve", "--port", "0", "--data-dir", str(data_dir), "--model", model)
    assert refused.returncode != 0
    assert says in " ".join(refused.stderr.split())


def test_a_family_that_the_engine_does_not_know(data_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    refused = gradserve("serve", "--port", "0", "--data-dir", str(data_dir), "--model", f"x={tmp_path}")
    assert "model_type 'gpt2' is not supported" in refused.stderr


def test_a_port_in_use(tiny_models: dict[str, str], data_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        refused = gradserve("serve", "--port", port, "--data-dir", str(data_dir), "--model", f"t={tiny_models['tiny']}")
    assert refused.returncode == 1
    assert "Choose another --port" in refused.stderr


def test_an_unusable_setting_names_itself(data_dir: Path) -> None:
    refused = gradserve("serve", "--data-dir", str(data_dir), GRADSERVE_TASK_TOKENS="none")
    assert refused.returncode == 1
    assert "task_tokens" in refused.stderr
