"""Weights & Biases, or a service that speaks its protocol (WANDB_BASE_URL); WANDB_MODE=offline works."""

from __future__ import annotations

import html
import os
import secrets
from collections.abc import Mapping

from gradserve.tracking.sinks import Begin, SinkUnusable
from gradserve.tracking.sinks.resumed import run_id


class WeightsAndBiases:
    """The project is WANDB_PROJECT, else gradserve. A resumed run goes on under its id.

    Logged steps can't be taken back there: what an interrupted run logged after its last checkpoint stays, beside what
    the resumed one logs. ``step`` is the x axis of everything.
    """

    def __init__(self, begin: Begin) -> None:
        try:
            import wandb
        except ImportError as error:
            raise SinkUnusable("the sink wandb needs a library: pip install 'gradserve[wandb]'") from error
        self._html = wandb.Html
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "gradserve"),
            dir=str(begin.folder),
            name=begin.run_name,
            config=dict(begin.config),
            id=run_id(begin, "wandb", lambda: secrets.token_hex(4)),
            resume="allow",
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def metrics(self, step: int, time: float, values: Mapping[str, float | None]) -> None:
        self._run.log({"step": step, **{name: value for name, value in values.items() if value is not None}})

    def text(self, step: int, time: float, name: str, markdown: str) -> None:
        self._run.log({"step": step, name: self._html(f"<pre>{html.escape(markdown)}</pre>", inject=False)})

    def close(self) -> None:
        self._run.finish()
