"""Expiring links to a checkpoint's files. A link needs no header; whoever holds it may read, until it expires."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets

import msgspec

from gradserve.wire.errors import Forbidden, Gone

LINK_TTL_S = 3600.0


class Link(msgspec.Struct, frozen=True, array_like=True):
    """What a token says: a checkpoint as its tenant sees it, until when."""

    tenant: str
    run_id: str
    kind: str
    name: str
    expires_at: float


class Signer:
    """HMAC-SHA256 under a secret that lives as long as the process: a restart invalidates all links."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def sign(self, link: Link) -> str:
        """The link as a URL-safe token."""
        payload = msgspec.msgpack.encode(link)
        return base64.urlsafe_b64encode(self._mac(payload) + payload).rstrip(b"=").decode()

    def read(self, token: str, now: float) -> Link:
        """The link of a token. Raises Forbidden for a forged one and Gone for one that has expired."""
        try:
            raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
        except (binascii.Error, ValueError):
            raw = b""
        mac, payload = raw[:32], raw[32:]
        if not hmac.compare_digest(mac, self._mac(payload)):
            raise Forbidden("link.invalid", "This link was not made by this server since it started.")
        link = msgspec.msgpack.decode(payload, type=Link)
        if link.expires_at < now:
            raise Gone("link.expired", "This link has expired.", fix="Ask for external_weights_urls again.")
        return link

    def _mac(self, payload: bytes) -> bytes:
        return hmac.new(self._secret, payload, hashlib.sha256).digest()
