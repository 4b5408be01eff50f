"""A file per noun; each ends with its table of routes."""

from __future__ import annotations

from gradserve.gateway.call import Api
from gradserve.gateway.routes import (
    checkpoints,
    files,
    futures,
    imports,
    ledger,
    losses,
    models,
    modules,
    runs,
    sampling,
    sessions,
    system,
    training,
    unserved,
    versions,
    weights,
)

ROUTES: list[Api] = [
    *futures.ROUTES,
    *training.ROUTES,
    *sampling.ROUTES,
    *system.ROUTES,
    *sessions.ROUTES,
    *models.ROUTES,
    *modules.ROUTES,
    *weights.ROUTES,
    *runs.ROUTES,
    *checkpoints.ROUTES,
    *files.ROUTES,
    *imports.ROUTES,
    *ledger.ROUTES,
    *losses.ROUTES,
    *versions.ROUTES,
    *unserved.ROUTES,
]
"""All paths below /api/v1; what is asked most often stands first, because the router looks through them in order."""
