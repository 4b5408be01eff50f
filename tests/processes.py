"""Servers that tests start, kill and start again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx


def free_port() -> int:
    """A port that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def serve_on(
    models: dict[str, str], data_dir: Path, port: int | None = None, **environment: str
) -> tuple[int, subprocess.Popen[bytes]]:
    """``gradserve serve`` as a user starts it; returns when it answers."""
    port = port or free_port()
    command = [sys.executable, "-m", "gradserve", "serve", "--port", str(port), "--data-dir", str(data_dir)]
    for name, source in models.items():
        command += ["--model", f"{name}={source}"]
    server = subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}")
        try:
            if httpx.get(f"http://127.0.0.1:{port}/api/v1/healthz").status_code == 200:
                return port, server
        except httpx.TransportError:
            time.sleep(0.05)
    server.kill()
    raise RuntimeError("the server did not answer within a minute")


def stop(server: subprocess.Popen[bytes]) -> None:
    """An orderly stop, as by Ctrl-C or a service manager."""
    server.send_signal(signal.SIGTERM)
    server.wait(30)
