"""Start TuFT 0.2.2 without a GPU: ray is told of one that does not exist, and its statistics are not asked for.

python tuft_server.py launch --port PORT --config FILE
"""

from __future__ import annotations

import sys

import ray  # type: ignore[import-not-found, unused-ignore]


def no_gpu_statistics() -> None:
    """Runs in each ray worker before TuFT's code."""
    import torch

    torch.cuda.reset_peak_memory_stats = lambda device=None: None


ray.init(num_gpus=1, include_dashboard=False, runtime_env={"worker_process_setup_hook": no_gpu_statistics})

from tuft.cli import main  # type: ignore[import-not-found, unused-ignore]  # noqa: E402

sys.exit(main())
