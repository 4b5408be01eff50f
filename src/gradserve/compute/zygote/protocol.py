"""What a server and its zygote say to each other.

A server keeps one connection, its *line*, open for as long as it lives: it sends Prepare, hears Prepared (or Outdated,
and the zygote ends), then Ended for each worker that ends; Stop ends the zygote at once. Each further connection
begins with Fork and becomes the pipe of the worker that is forked; the worker's first message on it is Born. With Fork
goes a file descriptor (SCM_RIGHTS), the server's standard error, which becomes the worker's.

A frame is the payload's length (4 bytes, signed, network order) and the payload, so that
``multiprocessing.connection.Connection`` can take a pipe over.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Sequence

import msgspec

from gradserve.compute.tasks import WorkerSpec

SOCKET, LOG = ".sock", ".log"
"""What the names of a zygote's socket, and of what it printed, end with."""

_LENGTH = struct.Struct("!i")


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Load the bases of ``spec``, if that is not done. ``fingerprint`` names all that a loaded base depends on.

    After the last server the zygote waits ``spare_s`` seconds for another.
    """

    fingerprint: str
    spec: WorkerSpec
    spare_s: float


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """The zygote has loaded what it can and forks without delay from now on."""

    pid: int


class Outdated(msgspec.Struct, frozen=True, tag="outdated"):
    """The zygote was prepared for another fingerprint and ends."""


class Fork(msgspec.Struct, frozen=True, tag="fork"):
    """Make a worker. ``token`` names this one birth among all."""

    token: str
    spec: WorkerSpec


class Born(msgspec.Struct, frozen=True, tag="born"):
    """Said by the new worker itself."""

    pid: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The operating system would not fork."""

    reason: str


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A worker ended; a negative ``exit_code`` is the signal that ended it."""

    token: str
    exit_code: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End now, with all workers."""


ToZygote = Prepare | Fork | Stop
FromZygote = Prepared | Outdated | Born | Refused | Ended

_encoder = msgspec.msgpack.Encoder()
_to_zygote = msgspec.msgpack.Decoder(ToZygote)
_from_zygote = msgspec.msgpack.Decoder(FromZygote)


def send(line: socket.socket, message: ToZygote | FromZygote, descriptors: Sequence[int] = ()) -> None:
    """Raises OSError. Messages are small enough never to wait for room."""
    payload = _encoder.encode(message)
    frame = _LENGTH.pack(len(payload)) + payload
    sent = socket.send_fds(line, [frame], list(descriptors)) if descriptors else line.send(frame)
    if sent < len(frame):
        line.sendall(frame[sent:])


def receive(line: socket.socket) -> tuple[ToZygote, list[int]]:
    """The next message and the descriptors that came with it. Raises EOFError, OSError."""
    header, descriptors, _, _ = socket.recv_fds(line, _LENGTH.size, 1)
    try:
        if not header:
            raise EOFError
        header += _exactly(line, _LENGTH.size - len(header))
        return _to_zygote.decode(_exactly(line, *_LENGTH.unpack(header))), descriptors
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _exactly(line: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = line.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return data


async def answer(line: socket.socket) -> FromZygote:
    """The next message to the server, whose ``line`` does not block. Raises EOFError, OSError."""
    (length,) = _LENGTH.unpack(await _soon(line, _LENGTH.size))
    return _from_zygote.decode(await _soon(line, length))


async def _soon(line: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < count:
        part = await loop.sock_recv(line, count - len(data))
        if not part:
            raise EOFError
        data += part
    return data
