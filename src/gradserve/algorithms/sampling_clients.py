"""Models that only answer: a reference, a teacher."""

from __future__ import annotations

from typing import Any

import tinker


def sampling_client(service: tinker.ServiceClient, model: str) -> tinker.SamplingClient:
    """Of a base model's name, or of weights by their ``tinker://`` path."""
    if model.startswith("tinker://"):
        return service.create_sampling_client(model_path=model).result()
    return service.create_sampling_client(base_model=model).result()


def tokenizer_of(client: tinker.SamplingClient) -> Any:
    """The one that the service names, which may be a folder; the client of a base model only knows the model's name."""
    session = client._sampling_session_id
    return tinker.SamplingClient.create(client.holder, sampling_session_id=session).result().get_tokenizer()
