"""A server for one process: started as a child, stopped with it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

_START_TIMEOUT_S = 180.0
"""A first start may convert a model."""

MODULES_ONLY = "modules only"
"""What a server without language models says that it serves."""


class ServerDidNotStart(RuntimeError):
    """The child ended or stayed silent; the message holds what it said."""


class EmbeddedServer:
    """``gradserve serve`` on a free port of the loopback interface.

    The child watches its standard input, so it ends with this process even when this process is killed.
    """

    def __init__(self, models: dict[str, str] | None = None, data_dir: Path | None = None) -> None:
        command = [sys.executable, "-m", "gradserve", "serve", "--port", "0", "--until-stdin-closes"]
        if models == {}:
            command.append("--no-models")
        for name, source in (models or {}).items():
            command += ["--model", f"{name}={source}"]
        if data_dir is not None:
            command += ["--data-dir", str(data_dir)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C is for the client, which then closes the pipe
            env={**os.environ, "GRADSERVE_HOST": "127.0.0.1", "PYTHONUNBUFFERED": "1"},
        )
        self.url, self.models = self._wait_until_listening()

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def stop(self) -> None:
        """Ask the server to stop and wait for it; harmless when it has stopped already."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)

    def _wait_until_listening(self) -> tuple[str, list[str]]:
        said: list[str] = []
        assert self._process.stdout is not None
        watchdog = threading.Timer(_START_TIMEOUT_S, self._process.kill)
        watchdog.start()
        try:
            for line in self._process.stdout:
                said.append(line)
                if " serves " in line and "http://" in line:
                    url, _, names = line.removeprefix("gradserve: ").strip().partition(" serves ")
                    threading.Thread(target=self._pass_on_output, daemon=True).start()
                    return url, [] if names == MODULES_ONLY else names.split(", ")
        finally:
            watchdog.cancel()
        raise ServerDidNotStart("the embedded gradserve server did not start:\n" + "".join(said[-20:]))

    def _pass_on_output(self) -> None:
        """What the server says later are warnings: show them, without the line meant for people at a terminal."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.startswith("  export "):
                print(line, end="", file=sys.stderr)
