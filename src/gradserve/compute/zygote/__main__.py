"""The zygote's process: ``python -m gradserve.compute.zygote LISTENER SPARE_S``.

LISTENER is the inherited descriptor of a listening Unix socket; after SPARE_S seconds without any connection the
process ends. It has one thread of Python and no pool of threads, so that forking it is safe: torch computes on one
thread here (a worker sets its own number after the fork).
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from gradserve.compute.engine import worker
from gradserve.compute.engine.preload import Preloaded, preload
from gradserve.compute.tasks import WorkerSpec
from gradserve.compute.zygote.protocol import (
    LOG,
    SOCKET,
    Born,
    Ended,
    Fork,
    Outdated,
    Prepare,
    Prepared,
    Refused,
    Stop,
    receive,
    send,
)

_A_FRAME_S = 10.0
"""How long a peer may take to send the rest of a message, or to take one."""
_REAP_S = 2.0
"""How long a killed worker is waited for at the end."""


class Zygote:
    """One loop over the listener, the connections and the ends of children."""

    def __init__(self, listener: socket.socket, spare_s: float) -> None:
        self._listener = listener
        self._path = Path(listener.getsockname())
        self._spare_s = spare_s
        self._fingerprint: str | None = None
        self._preloaded: Preloaded | None = None
        self._lines: set[socket.socket] = set()
        self._alone_since = time.monotonic()
        self._children: dict[int, str] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._deaths = self._wake_on_deaths()

    def serve(self) -> None:
        """Until Stop, another configuration, or too long without a server."""
        try:
            while self._patience_s() > 0:
                for key, _ in self._selector.select(self._patience_s()):
                    handle: Callable[[], None] = key.data
                    handle()
        except _Over:
            pass
        finally:
            self._leave()

    def _patience_s(self) -> float:
        if self._lines:
            return _FOREVER_S
        return self._alone_since + self._spare_s - time.monotonic()

    def _accept(self) -> None:
        line, _ = self._listener.accept()
        line.settimeout(_A_FRAME_S)
        self._lines.add(line)
        self._selector.register(line, selectors.EVENT_READ, lambda: self._hear(line))

    def _hear(self, line: socket.socket) -> None:
        try:
            message, descriptors = receive(line)
        except (EOFError, OSError):
            self._forget(line)
            return
        match message:
            case Prepare():
                self._prepare(line, message)
            case Fork():
                self._fork(line, message, descriptors)
            case Stop():
                raise _Over

    def _forget(self, line: socket.socket) -> None:
        self._selector.unregister(line)
        self._lines.remove(line)
        line.close()
        self._alone_since = time.monotonic()

    def _prepare(self, line: socket.socket, message: Prepare) -> None:
        if self._fingerprint not in (None, message.fingerprint):
            self._tell(line, Outdated())
            raise _Over
        if self._fingerprint is None:
            self._preloaded = preload(message.spec)
            self._fingerprint = message.fingerprint
            gc.collect()
            gc.freeze()  # a collection in a worker would write to, and so copy, the pages of all these objects
        self._spare_s = message.spare_s
        self._tell(line, Prepared(os.getpid()))

    def _fork(self, line: socket.socket, message: Fork, descriptors: list[int]) -> None:
        """The connection becomes the worker's; this process has nothing more to do with it."""
        try:
            pid = os.fork()
        except OSError as error:
            self._tell(line, Refused(f"the zygote could not fork: {error.strerror}"))
        else:
            if pid == 0:
                self._be_worker(line, message.spec, descriptors)
            self._children[pid] = message.token
        for descriptor in descriptors:
            os.close(descriptor)
        self._forget(line)

    def _be_worker(self, pipe: socket.socket, spec: WorkerSpec, descriptors: list[int]) -> NoReturn:
        """Never returns, so that no frame of the zygote's is ever left in a worker."""
        try:
            self._drop_what_is_the_zygotes(pipe)
            for descriptor in descriptors:
                os.dup2(descriptor, 1)
                os.dup2(descriptor, 2)
                os.close(descriptor)
            pipe.settimeout(None)
            send(pipe, Born(os.getpid()))
            worker.main(Connection(pipe.detach()), spec, self._preloaded)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)

    def _drop_what_is_the_zygotes(self, pipe: socket.socket) -> None:
        """Its sockets above all: a server would not see them close when the zygote dies."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for one in (self._listener, self._deaths, self._waker, *self._lines - {pipe}):
            one.close()

    def _wake_on_deaths(self) -> socket.socket:
        deaths, self._waker = socket.socketpair()
        for end in (deaths, self._waker):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # any handler does: it is the byte written that wakes
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self._selector.register(deaths, selectors.EVENT_READ, self._reap)
        return deaths

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._deaths.recv(4096)
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            ended = Ended(self._children.pop(pid), os.waitstatus_to_exitcode(status))
            for line in list(self._lines):
                self._tell(line, ended)

    def _tell(self, line: socket.socket, message: Prepared | Outdated | Refused | Ended) -> None:
        with contextlib.suppress(OSError):  # who has closed it is forgotten when that is read
            send(line, message)

    def _leave(self) -> None:
        """No child stays behind, and no file; the folder is the server's."""
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + _REAP_S
        while self._children and time.monotonic() < until:
            self._reap()
            time.sleep(0.005)
        for suffix in (SOCKET, LOG):
            self._path.with_suffix(suffix).unlink(missing_ok=True)


_FOREVER_S = 3600.0
"""A wait that is simply begun again."""


class _Over(Exception):
    """Nothing is left to do here."""


def main() -> None:
    """See the module."""
    Zygote(socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2])).serve()


if __name__ == "__main__":
    main()
