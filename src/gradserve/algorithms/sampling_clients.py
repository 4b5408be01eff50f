"""Models that only answer: a reference, a teacher."""

from __future__ import annotations

import tinker


def sampling_client(service: tinker.ServiceClient, model: str) -> tinker.SamplingClient:
    """Of a base model's name, or of weights by their ``tinker://`` path."""
    if model.startswith("tinker://"):
        return service.create_sampling_client(model_path=model).result()
    return service.create_sampling_client(base_model=model).result()
