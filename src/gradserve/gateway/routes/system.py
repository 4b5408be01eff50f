"""What the server is and how clients should behave."""

from __future__ import annotations

import hashlib

import msgspec
from starlette.responses import Response

from gradserve.gateway.call import Api, Call, answer_json

_CHUNK_BYTES = 32_000_000
_CANCELS_AT_ONCE = 64
"""How many cancel_future requests a client sends side by side: as many as the public client does by itself."""


class SupportedModel(msgspec.Struct, frozen=True):
    """A base model on offer."""

    model_name: str
    max_context_length: int
    trainable: bool = True
    sampleable: bool = True


async def client_config(call: Call) -> Response:
    """Flags that the public client obeys.

    Chunks of one call are sent one after another: in parallel, a refused chunk would leave the client waiting for
    its own turn counter for ever.
    """
    return answer_json(
        {
            "pjwt_auth_enabled": False,
            "parallel_fwdbwd_chunks": False,
            "proto_compress_fwdbwd": True,
            "fwdbwd_max_chunk_bytes_count": min(_CHUNK_BYTES, call.gateway.settings.max_body_bytes // 2),
            "sample_join_sampling_session": True,
            "sample_use_retrieve_futures": False,
            "custom_loss_server_side": True,
        }
    )


async def dynamic_config(call: Call) -> Response:
    """Flags that a client asks for again and again."""
    return answer_json(
        {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": _CANCELS_AT_ONCE}
    )


async def telemetry(call: Call) -> Response:
    """Accepted and dropped unread: events of the public client may carry keys and tracebacks."""
    return answer_json({"status": "accepted"})


async def capabilities(call: Call) -> Response:
    """The base models on offer."""
    models = [SupportedModel(facts.name, facts.context) for facts in call.gateway.catalog.all()]
    return answer_json({"supported_models": models})


async def healthz(call: Call) -> Response:
    """Whether the server can work. 503 when it says that it can't."""
    report = {"status": "ok", **call.gateway.health()}
    return answer_json(report, 200 if report["status"] == "ok" else 503)


async def own_key(call: Call) -> Response:
    """What ``tinker auth login`` shows about the key it was given."""
    key_id = int.from_bytes(hashlib.sha256(call.tenant.encode()).digest()[:4], "big")
    details = {"org_details": {"name": "gradserve"}, "user_details": {"email": call.tenant}}
    return answer_json({"key_id": key_id, "name": call.tenant, "note": "", "details": details})


ROUTES = [
    Api("POST", "/client/config", client_config),
    Api("POST", "/client/dynamic_config", dynamic_config),
    Api("POST", "/telemetry", telemetry),
    Api("GET", "/get_server_capabilities", capabilities),
    Api("GET", "/healthz", healthz, public=True),
    Api("GET", "/auth/apikey/me", own_key),
]
