"""One line in one process: gradserve.connect()."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import gradserve
from gradserve.client.connect import EmbeddedServiceClient
from gradserve.client.embedded import ServerDidNotStart
from tests.sdk import supervised, train


def test_an_embedded_server_lives_as_long_as_its_client(tiny_models: dict[str, str], data_dir: Path) -> None:
    with gradserve.connect(models={"tiny": tiny_models["tiny"]}, data_dir=data_dir) as service:
        assert isinstance(service, EmbeddedServiceClient)
        pid = service.server.pid
        assert psutil.pid_exists(pid)
        run = service.create_lora_training_client(base_model="tiny", rank=4).result()
        assert len(train(run, supervised(2), steps=1)) == 1
        children = psutil.Process(pid).children(recursive=True)
    _, alive = psutil.wait_procs([*children], timeout=10)
    assert not alive
    assert not psutil.pid_exists(pid)


def test_a_killed_script_leaves_no_server_behind(tiny_models: dict[str, str], data_dir: Path) -> None:
    code = (
        "import gradserve, time\n"
        f"service = gradserve.connect(models={{'tiny': {tiny_models['tiny']!r}}}, data_dir={str(data_dir)!r})\n"
        "print(service.server.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    script = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert script.stdout is not None
    pid = int(script.stdout.readline())
    server = psutil.Process(pid)
    everyone = [server, *server.children(recursive=True)]
    script.send_signal(signal.SIGKILL)
    script.wait()
    _, alive = psutil.wait_procs(everyone, timeout=30)
    assert not alive


def test_gradserve_url_is_used_when_set(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSERVE_URL", url)
    service = gradserve.connect()
    assert not isinstance(service, EmbeddedServiceClient)
    names = {model.model_name for model in service.get_server_capabilities().supported_models}
    assert names == {"tiny", "tiny-qwen"}
    with pytest.raises(ValueError, match="already running"):
        gradserve.connect(models={"a": "b"})


def test_a_server_that_cannot_start_says_why(data_dir: Path) -> None:
    with pytest.raises(ServerDidNotStart, match="neither a directory"):
        gradserve.connect(models={"x": "no-such-thing"}, data_dir=data_dir)


def test_two_servers_do_not_share_a_data_directory(tiny_models: dict[str, str], data_dir: Path) -> None:
    first = gradserve.connect(models={"tiny": tiny_models["tiny"]}, data_dir=data_dir)
    try:
        with pytest.raises(ServerDidNotStart, match="another gradserve"):
            gradserve.connect(models={"tiny": tiny_models["tiny"]}, data_dir=data_dir)
    finally:
        first.close("success")


def test_importing_gradserve_loads_nothing_heavy() -> None:
    code = "import sys, gradserve; print([m for m in ('torch', 'tinker', 'fastapi') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_the_client_side_works_where_the_servers_packages_are_missing(url: str) -> None:
    """As after a plain ``pip install gradserve``: no torch, no web framework, no database."""
    missing = ("torch", "fastapi", "starlette", "uvicorn", "sqlalchemy", "alembic", "msgspec", "safetensors")
    code = (
        "import sys\n"
        f"for name in {missing}: sys.modules[name] = None\n"
        f"import gradserve; service = gradserve.connect({url!r})\n"
        "run = service.create_lora_training_client(base_model='tiny', rank=4).result()\n"
        "print(run.get_info().lora_rank)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "4", ran.stderr
