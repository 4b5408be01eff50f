"""Reading a request's body without letting it fill the memory, compressed or not."""

from __future__ import annotations

import zstandard
from starlette.requests import Request

from gradserve.gateway.errors import TooLarge
from gradserve.wire.errors import Invalid

_PIECE = 1 << 20
_MAX_WINDOW = 1 << 27
_START = 256 << 10


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body, decompressed when ``Content-Encoding`` is zstd. Raises TooLarge above ``max_bytes`` of either form."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "", "zstd"):
        raise Invalid(
            "body.encoding",
            f"Content-Encoding {encoding!r} is not decoded here.",
            field="Content-Encoding",
            fix="Send zstd or no encoding.",
        )
    declared = request.headers.get("content-length", "")
    hopeless = declared.isdigit() and int(declared) > max_bytes
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes or hopeless:
            start = bytes(body[:_START])
            raise too_large(max_bytes, start if encoding != "zstd" else _unzstd_start(start))
    return unzstd(bytes(body), max_bytes) if encoding == "zstd" else bytes(body)


def unzstd(data: bytes, max_bytes: int) -> bytes:
    """Decompress at most ``max_bytes``; a frame that declares more is refused before anything is allocated."""
    try:
        if zstandard.frame_content_size(data) > max_bytes:
            raise too_large(max_bytes, _unzstd_start(data[:_START]))
        pieces: list[bytes] = []
        left = max_bytes
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        with decompressor.stream_reader(data, read_across_frames=True) as reader:
            while piece := reader.read(_PIECE):
                left -= len(piece)
                if left < 0:
                    raise too_large(max_bytes, (pieces[0] if pieces else piece)[:_START])
                pieces.append(piece)
    except zstandard.ZstdError as error:
        raise Invalid("body.encoding", f"The body is not valid zstd ({error}).") from error
    return b"".join(pieces)


def _unzstd_start(data: bytes) -> bytes:
    """What the first bytes of a zstd stream decode to, as far as they go; empty when they go nowhere."""
    try:
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        with decompressor.stream_reader(data) as reader:
            return reader.read(_START)
    except zstandard.ZstdError:
        return b""


def too_large(max_bytes: int, start: bytes) -> TooLarge:
    """The refusal, with the cure."""
    error = TooLarge(
        "body.too_large",
        f"The body is larger than {max_bytes} bytes.",
        fix="Send fewer rows per request, or raise GRADSERVE_MAX_BODY_BYTES on the server.",
    )
    error.start = start
    return error
