"""TrainingClients for runs that the public SDK has no method for: all parameters of a base, adapters with a value head.

These ask as the SDK's own ``create_lora_training_client`` does (0.38), with
one field more, and return the SDK's own TrainingClient.
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

    parameters: Literal["full", "lora"]
    value_head: bool = False


class ExtendedRequest(types.CreateModelRequest):
    """create_model with gradserve's own field."""

    gradserve: Extension


def create_full_training_client(
    service: ServiceClient, base_model: str, user_metadata: dict[str, str] | None = None
) -> AwaitableConcurrentFuture[TrainingClient]:
    """A future of the client; await it or call ``.result()``.

    ``service`` must be connected to a gradserve server. Raises what the SDK raises when the server refuses: the base is
    unknown, or training all of its parameters would not fit into the machine's memory.
    """
    return _created(service, base_model, user_metadata, Extension(parameters="full"))


def create_lora_training_client(
    service: ServiceClient,
    base_model: str,
    rank: int = 32,
    seed: int | None = None,
    train_mlp: bool = True,
    train_attn: bool = True,
    train_unembed: bool = True,
    user_metadata: dict[str, str] | None = None,
    *,
    value_head: bool = False,
) -> AwaitableConcurrentFuture[TrainingClient]:
    """As the SDK's own method, and with ``value_head`` a head beside the adapters that losses read as ``values``.

    The head maps what the output layer reads to one number per position; it is trained with the adapters, saved and
    loaded with them, and 0 at first. ``service`` must be connected to a gradserve server.
    """
    lora = types.LoraConfig(
        rank=rank, seed=seed, train_mlp=train_mlp, train_attn=train_attn, train_unembed=train_unembed
    )
    extension = Extension(parameters="lora", value_head=value_head)
    return _created(service, base_model, user_metadata, extension, lora)


def _created(
    service: ServiceClient,
    base_model: str,
    user_metadata: dict[str, str] | None,
    extension: Extension,
    lora: types.LoraConfig | None = None,
) -> AwaitableConcurrentFuture[TrainingClient]:
    holder = service.holder
    request = ExtendedRequest(
        session_id=holder.get_session_id(),
        model_seq_id=holder.get_training_client_id(),
        base_model=base_model,
        lora_config=lora,
        user_metadata=user_metadata,
        gradserve=extension,
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
