"""Who is asking: an X-API-Key becomes a tenant, and every later question to the store carries that tenant."""

from __future__ import annotations

import hashlib
import hmac

from gradserve.settings import KEY_PREFIX, Settings
from gradserve.wire.errors import Unauthenticated

LOCAL_TENANT = "local"
"""Who everybody is on a server that only this machine can reach and that has no keys."""


class Keys:
    """Immutable after start. Keeps digests of the keys, never the keys."""

    def __init__(self, settings: Settings) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in settings.api_keys]
        self._open = settings.on_loopback and not settings.api_keys

    def tenant(self, key: str | None) -> str:
        """The tenant of a key. Raises Unauthenticated."""
        if not key:
            raise Unauthenticated(
                "auth.missing",
                "There is no X-API-Key header.",
                field="X-API-Key",
                fix="Set TINKER_API_KEY; on a server without keys any value that starts with 'tml-' will do.",
            )
        if self._open:
            if key.startswith(KEY_PREFIX):
                return LOCAL_TENANT
            raise _unknown_key()
        digest = hashlib.sha256(key.encode()).digest()
        # All are compared, so that the time does not tell which one matched.
        if sum(hmac.compare_digest(digest, known) for known in self._digests):
            return "key-" + digest.hex()[:12]
        raise _unknown_key()


def _unknown_key() -> Unauthenticated:
    return Unauthenticated(
        "auth.unknown_key",
        "This server does not know the key in X-API-Key.",
        field="X-API-Key",
        fix="Use one of the keys that the server was started with (GRADSERVE_API_KEYS).",
    )
