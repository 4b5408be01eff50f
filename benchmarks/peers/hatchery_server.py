"""Start hatchery-core 0.3.0 on the CPU in float32; its own launcher would fall back to a scripted worker there.

    HATCHERY_DEV_PORT=.. HATCHERY_DEV_API_KEY=.. HATCHERY_DEV_DEVICE=cpu:0 HATCHERY_DEV_BASE_MODEL=.. \\
        python hatchery_server.py
"""

from __future__ import annotations

import functools
import sys

import torch
from hatchery.core import local_dev, worker  # type: ignore[import-not-found, unused-ignore]

local_dev._has_gpu = lambda: True
worker.GPUWorker = functools.partial(worker.GPUWorker, dtype=torch.float32)
sys.exit(local_dev.main())
