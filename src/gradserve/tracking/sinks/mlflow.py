"""MLflow: the server, folder or database of MLFLOW_TRACKING_URI, in the experiment MLFLOW_EXPERIMENT_NAME."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from gradserve.tracking.sinks import Begin, SinkUnusable
from gradserve.tracking.sinks.background import Background
from gradserve.tracking.sinks.resumed import run_id

_PARAMS_A_CALL = 100
"""The service's limit."""


def open_mlflow(begin: Begin) -> Background:
    """In the background, as its client tries a server that is gone again for minutes."""
    return Background(MLflow(begin))


class MLflow:
    """The experiment is gradserve without that variable. A resumed run goes on under its id.

    Logged steps can't be taken back there: what an interrupted run logged after its last checkpoint stays, beside what
    the resumed one logs.
    """

    def __init__(self, begin: Begin) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise SinkUnusable("the sink mlflow needs a library: pip install 'gradserve[mlflow]'") from error
        self._metric = mlflow.entities.Metric
        self._client = mlflow.MlflowClient()
        self._run = run_id(begin, "mlflow", lambda: self._created(mlflow, begin))

    def metrics(self, step: int, time: float, values: Mapping[str, float | None]) -> None:
        milliseconds = int(time * 1000)
        rows = [self._metric(name, value, milliseconds, step) for name, value in values.items() if value is not None]
        self._client.log_batch(self._run, metrics=rows)

    def text(self, step: int, time: float, name: str, markdown: str) -> None:
        self._client.log_text(self._run, markdown, f"{re.sub(r'[^A-Za-z0-9_./-]', '_', name)}/step-{step:08d}.md")

    def close(self) -> None:
        self._client.set_terminated(self._run)

    def _created(self, mlflow: Any, begin: Begin) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "gradserve")
        experiment = self._client.get_experiment_by_name(name)
        identity = experiment.experiment_id if experiment else self._client.create_experiment(name)
        created: str = self._client.create_run(identity, run_name=begin.run_name).info.run_id
        params = [mlflow.entities.Param(name, str(value)) for name, value in _flat(begin.config).items()]
        for first in range(0, len(params), _PARAMS_A_CALL):
            self._client.log_batch(created, params=params[first : first + _PARAMS_A_CALL])
        return created


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"data": {"path": "a"}} becomes {"data.path": "a"}."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat
