"""The server's side of its zygote: finds the one that a dead server left or starts one, and has it fork."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gradserve.compute.tasks import WorkerSpec
from gradserve.compute.zygote.fingerprint import fingerprint
from gradserve.compute.zygote.protocol import (
    LOG,
    SOCKET,
    Born,
    Ended,
    Fork,
    Prepare,
    Prepared,
    Refused,
    Stop,
    answer,
    send,
)

log = logging.getLogger(__name__)

SPARE_S = 180.0
"""How long loaded models wait for the next server after one died. An orderly stop ends them at once."""

_LONGEST_PATH = 100
"""Bytes; a Unix socket's address takes 103 (macOS) or 107 (Linux)."""
_FORK_S = 30.0
"""A prepared zygote does nothing but fork: one that needs longer is stuck, and replaced."""
_STOP_S = 3.0
_STANDARD_ERROR = 2


class CannotFork(Exception):
    """There is no worker; the message says why in words."""


@dataclass(frozen=True)
class Birth:
    """A new worker: its process, the pipe to it (blocking), and its exit code when it has ended.

    The exit code is negative for a signal, and None where nobody can tell since the zygote died first.
    """

    pid: int
    pipe: socket.socket
    ended: asyncio.Future[int | None]


def home(fast: Path) -> Path:
    """Where the zygote of a data directory has its socket: beside its fast object tier, if the path is short enough."""
    beside = fast.with_name(f"{fast.name}-zygote")
    if len(os.fsencode(beside)) + len("/12345678.sock") <= _LONGEST_PATH:
        return beside
    name = hashlib.sha256(os.fsencode(fast)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"gradserve-{os.getuid()}-{name}-zygote"


class Zygote:
    """One per server. All but ``warm_up`` and ``stop`` belong to one event loop."""

    def __init__(self, home: Path, spare_s: float = SPARE_S) -> None:
        self._home = home
        self._spare_s = spare_s
        self._path = home
        self._line: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None
        self._returned = 0
        self._prepared = False
        self._preparing = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None
        self._births: dict[str, asyncio.Future[int | None]] = {}

    def warm_up(self) -> None:
        """Connect to the zygote that is there, or start one, which then imports torch while the caller goes on.

        Raises CannotFork when that is not possible, or its directory belongs to somebody else.
        """
        if self._line is not None:
            return
        try:
            _make_private(self._home)
            self._line = self._find() or self._begin()
        except OSError as error:
            raise CannotFork(f"no zygote could be started: {error}") from error

    async def fork(self, spec: WorkerSpec) -> Birth:
        """A new worker; the first one waits until the bases are loaded. Raises CannotFork."""
        await self._prepare(spec)
        pipe = _connect(self._path)
        if pipe is None:
            raise CannotFork("the zygote is gone")
        token = secrets.token_hex(8)
        ended = self._births[token] = asyncio.get_running_loop().create_future()
        ended.add_done_callback(lambda _: self._births.pop(token))  # on a later turn of the loop
        try:
            pid = await self._pid_of(pipe, Fork(token, spec))
        except BaseException:
            pipe.close()  # a worker that finds it closed ends
            ended.cancel()
            raise
        pipe.setblocking(True)
        return Birth(pid, pipe, ended)

    async def close(self) -> None:
        """End the zygote, and with it all workers that are left."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """The same without an event loop; nothing happens the second time."""
        if self._line is None:
            return
        line, self._line = self._line, None
        with line:
            if self._process is not None and not self._prepared:
                self._process.kill()  # it is importing, and would hear of it only then
            elif not _stopped(line) and self._pid is not None:
                os.kill(self._pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        shutil.rmtree(self._home, ignore_errors=True)

    # Finding and starting ------------------------------------------------------------------------------------------

    def _find(self) -> socket.socket | None:
        """One that a dead server left. There is never a second one, but for a moment at the end of its life."""
        for path in sorted(self._home.glob(f"*{SOCKET}")):
            line = _connect(path)
            if line is not None:
                self._path = path
                return line
            path.unlink(missing_ok=True)
            path.with_suffix(LOG).unlink(missing_ok=True)
        return None

    def _begin(self) -> socket.socket:
        """Start a process. It inherits its listening socket, so that this can connect at once."""
        self._path = self._home / f"{secrets.token_hex(4)}{SOCKET}"
        # By default idle threads of OpenMP spin. With anything else running on the machine (the client's script, say) a
        # spinning thread loses its time slice when its partner needs it: measured 2 to 10 times slower on two busy
        # cores. Workers inherit the variable.
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
            open(self._path.with_suffix(LOG), "wb") as output,
        ):
            listener.bind(str(self._path))
            listener.listen(64)
            number = listener.fileno()
            command = [sys.executable, "-m", __package__, str(number), str(self._spare_s)]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                pass_fds=[number],
                start_new_session=True,  # neither Ctrl-C nor the end of the server's terminal is for it
            )
            line = _connect(self._path)
        assert line is not None
        return line

    # Its life ------------------------------------------------------------------------------------------------------

    async def _prepare(self, spec: WorkerSpec) -> None:
        async with self._preparing:
            if self._prepared:
                return
            self.warm_up()
            found = self._process is None
            if not await self._agrees(spec, _FORK_S if found else None):
                self._drop()
                if not found:
                    raise CannotFork(f"the zygote ended: {self._last_words()}")
                log.info("the process that a server left for this one is of another configuration; it is replaced")
                self.warm_up()
                if not await self._agrees(spec):
                    self._drop()
                    raise CannotFork(f"the zygote ended: {self._last_words()}")
            self._prepared = True
            self._watcher = asyncio.create_task(self._watch(spec))

    async def _agrees(self, spec: WorkerSpec, limit_s: float | None = None) -> bool:
        """Waits until the zygote has loaded the bases. False when it is of another configuration, or has died.

        One that a server left should have loaded them: ``limit_s`` bounds how long a stuck one is waited for.
        """
        assert self._line is not None
        try:
            send(self._line, Prepare(fingerprint(spec), spec, self._spare_s))
            async with asyncio.timeout(limit_s):
                reply = await answer(self._line)
        except (EOFError, OSError):  # TimeoutError is an OSError
            return False
        if isinstance(reply, Prepared):
            self._pid = reply.pid
        return isinstance(reply, Prepared)

    async def _watch(self, spec: WorkerSpec) -> None:
        """Until the zygote dies; then begin another, so that it is there when a worker dies too."""
        assert self._line is not None
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = await answer(self._line)
                if isinstance(message, Ended):
                    self._settle(message.token, message.exit_code)
        self._drop()
        log.warning("the zygote ended: %s; another is started", self._last_words())
        for token in self._births:
            self._settle(token, None)
        try:
            await self._prepare(spec)
        except CannotFork as error:
            log.error("%s", error)  # the next worker that is wanted tries again

    def _settle(self, token: str, exit_code: int | None) -> None:
        ended = self._births.get(token)
        if ended is not None and not ended.done():
            ended.set_result(exit_code)

    async def _pid_of(self, pipe: socket.socket, wanted: Fork) -> int:
        try:
            send(pipe, wanted, [_STANDARD_ERROR])
            async with asyncio.timeout(_FORK_S):
                born = await answer(pipe)
        except TimeoutError:
            assert self._pid is not None
            os.kill(self._pid, signal.SIGKILL)
            raise CannotFork(f"the zygote did not answer for {_FORK_S:.0f} s; it is replaced") from None
        except (EOFError, OSError) as error:
            raise CannotFork(f"the zygote did not fork: {error or 'it ended'}") from error
        if isinstance(born, Born):
            return born.pid
        raise CannotFork(born.reason if isinstance(born, Refused) else f"the zygote answered {born}")

    def _drop(self) -> None:
        """Forget a zygote that has ended or is about to."""
        assert self._line is not None
        self._line.close()
        self._line = self._pid = None
        self._prepared = False
        if self._process is not None:
            self._process.kill()
            self._returned = self._process.wait()
            self._process = None

    def _last_words(self) -> str:
        """How one of ours ended: its signal, or the last line it wrote."""
        if self._returned < 0:
            return f"signal {signal.Signals(-self._returned).name}"
        try:
            lines = self._path.with_suffix(LOG).read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1] if lines else f"exit code {self._returned}"


def _connect(path: Path) -> socket.socket | None:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        line.connect(str(path))
    except OSError:
        line.close()
        return None
    line.setblocking(False)
    return line


def _stopped(line: socket.socket) -> bool:
    """Whether a zygote that is told to stop is gone in a moment."""
    line.settimeout(_STOP_S)
    try:
        send(line, Stop())
        while line.recv(4096):
            continue
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def _make_private(folder: Path) -> None:
    """Whoever can connect can start processes. Raises CannotFork when the folder is not, or not only, ours."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise CannotFork(f"{folder} belongs to somebody else or is open to others: remove it")
