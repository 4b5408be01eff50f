"""A TrainingClient for a run that trains all parameters of its base.

The public SDK has no method for it. This one asks as the SDK's own ``create_lora_training_client`` does (0.38), with
one field more, and returns the SDK's own TrainingClient.
"""

from __future__ import annotations

import time
from typing import Literal

from pydantic import BaseModel
from tinker import ServiceClient, TrainingClient, types
from tinker.lib.api_future_impl import _APIFuture
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType
from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture
from tinker.lib.public_interfaces.training_client import fetch_training_info


class Extension(BaseModel):
    """What gradserve adds to create_model."""

    parameters: Literal["full"] = "full"


class CreateFullModelRequest(types.CreateModelRequest):
    """create_model without adapters."""

    gradserve: Extension = Extension()


def create_full_training_client(
    service: ServiceClient, base_model: str, user_metadata: dict[str, str] | None = None
) -> AwaitableConcurrentFuture[TrainingClient]:
    """A future of the client; await it or call ``.result()``.

    ``service`` must be connected to a gradserve server. Raises what the SDK raises when the server refuses: the base is
    unknown, or training all of its parameters would not fit into the machine's memory.
    """
    holder = service.holder
    request = CreateFullModelRequest(
        session_id=holder.get_session_id(),
        model_seq_id=holder.get_training_client_id(),
        base_model=base_model,
        user_metadata=user_metadata,
    )

    async def create() -> TrainingClient:
        asked_at = time.time()
        with holder.aclient(ClientConnectionPoolType.TRAIN) as client:
            accepted = await client.models.create(request=request)
        created = await _APIFuture(
            types.CreateModelResponse, holder, accepted, request_start_time=asked_at, request_type="CreateModel"
        ).result_async()
        info = await fetch_training_info(holder, created.model_id)
        return TrainingClient(holder, model_seq_id=request.model_seq_id, model_id=created.model_id, info=info)

    return holder.run_coroutine_threadsafe(create())
