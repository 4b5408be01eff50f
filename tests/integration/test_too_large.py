"""A request that cannot fit is refused before it is computed; the run and the server go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import tinker

from tests.processes import serve_on, stop
from tests.sdk import adam, supervised

ROOM = 3 << 20


@pytest.fixture
def url(tiny_models: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """A server whose worker may take three MiB for a pass."""
    settings = {"GRADSERVE_WORKER_MEMORY_BYTES": str(ROOM)}
    port, server = serve_on({"tiny": tiny_models["tiny"]}, tmp_path / "data", None, **settings)
    yield f"http://127.0.0.1:{port}"
    stop(server)


def test_a_row_that_does_not_fit(url: str) -> None:
    service = tinker.ServiceClient(base_url=url, api_key="tml-test")
    run = service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
    run.forward_backward(supervised(2), "cross_entropy").result()
    with pytest.raises(tinker.TinkerError) as caught:
        run.forward_backward(supervised(1, shortest=500, longest=500), "cross_entropy").result()
    for part in (f"{ROOM:,} bytes are available", "longest row 500", "tokens would fit", "worker_memory_bytes"):
        assert part in str(caught.value)
    metrics = run.optim_step(adam()).result().metrics
    assert metrics is not None
    assert metrics["grad_norm"] > 0
    workers = httpx.get(f"{url}/api/v1/healthz").json()["workers"]
    assert [worker["restarts"] for worker in workers] == [0]
