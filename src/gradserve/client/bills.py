"""What a run has cost so far, asked with its own client's URL and key."""

from __future__ import annotations

from typing import Any

from tinker import TrainingClient

from gradserve.client.connect import LOCAL_KEY
from gradserve.client.extensions import bill


def bill_of(run: TrainingClient) -> dict[str, Any]:
    """See extensions.bill. Raises ExtensionError; of another service than gradserve its status is below 500."""
    return bill(str(run.holder._base_url), str(run.model_id), run.holder._api_key or LOCAL_KEY)
