"""What all trainers of language models share: the loop around a step.

A subclass says what one optimizer step asks for and how an evaluation is made. Here are the run, its checkpoints and
the log folder; training_loop has the steps, evaluations and what ends a training. Everything goes over the public
tinker protocol, so a trainer works against any service that speaks it; what only gradserve has (``max_usd``) is said
where it is asked for.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import tinker
from tinker import types

from gradserve.algorithms.log_folder import LogFolder, Saved
from gradserve.algorithms.schedules import Schedule, value_at
from gradserve.algorithms.stopping import Budget, EarlyStop
from gradserve.algorithms.tasks.manifest import manifest_of
from gradserve.algorithms.training_loop import Answer, Batch, Callback, Fitted, Metrics, TrainingLoop
from gradserve.client.bills import bill_of
from gradserve.client.connect import connect
from gradserve.client.extensions import ExtensionError
from gradserve.data.dataset import Dataset
from gradserve.tracking.tracker import Tracker


class Trainer(abc.ABC):
    """A context manager; ``close`` ends the server that was started for it. See the subclasses."""

    kind: ClassVar[str]
    """The name of its log folders."""
    shown: ClassVar[Mapping[str, str]] = {}
    """Metrics for the progress line, with their labels."""
    ahead: ClassVar[int] = 1
    """Steps that are asked for before the oldest one's answer is there."""
    _made_with: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *arguments: Any, **keywords: Any) -> Self:
        made = super().__new__(cls)
        made._made_with = (arguments, keywords)  # here, where a subclass's own are seen too: for the manifest
        return made

    def __init__(
        self,
        model: str,
        *,
        rank: int,
        learning_rate: Schedule,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_clip_norm: float = 0.0,
        seed: int = 0,
        service: tinker.ServiceClient | None = None,
        log_dir: str | Path | None = None,
        sinks: Sequence[str] = (),
    ) -> None:
        value_at(learning_rate, 0.0)
        self.base_model, self.rank, self.seed = model, rank, seed
        self._targets = {"train_mlp": train_mlp, "train_attn": train_attn, "train_unembed": train_unembed}
        self._learning_rate = learning_rate
        self._adam = {
            "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay, "grad_clip_norm": grad_clip_norm
        }  # fmt: skip
        self._given_service, self._service = service, service
        self._log_dir, self._sinks = log_dir, tuple(sinks)
        self._run: tinker.TrainingClient | None = None
        self._model: tinker.SamplingClient | None = None
        self.tracker: Tracker | None = None
        """While ``fit`` is on: for what a callback wants to log beside the rest."""
        self.step = 0
        """Optimizer steps that the run has behind it."""

    # What a subclass says

    @abc.abstractmethod
    def _ask(self, items: Sequence[Any], learning_rate: float) -> Answer:
        """Ask for one optimizer step."""

    @abc.abstractmethod
    def _evaluate(self, rows: Sequence[Mapping[str, Any]]) -> Metrics:
        """Of the run as it is now; names begin with ``eval/``."""

    def _begin(self) -> None:  # noqa: B027  (a hook that not all need, as the next ones)
        """The run is there, at ``self.step``: get what the training needs."""

    def _end(self) -> None:  # noqa: B027
        """The training is over, well or not: give back what it needed."""

    def _state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside weights, moments and the place in the data; JSON."""
        return {}

    def _restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """The inverse of ``_state``; called before ``_begin``."""

    def _batches(self, dataset: Dataset, batch_size: int, epochs: int) -> Generator[Batch]:
        """All batches from the dataset's position on. An epoch's last batch may be smaller."""
        while dataset.epoch < epochs:
            epoch, waited = dataset.epoch + 1, dataset.data_loading_time
            rows: list[Mapping[str, Any]] = []
            for row in dataset:
                rows.append(row)
                if len(rows) == batch_size:
                    yield Batch(rows, epoch, dataset.position(), dataset.data_loading_time - waited)
                    rows, waited = [], dataset.data_loading_time
            if rows:
                yield Batch(rows, epoch, dataset.position(), dataset.data_loading_time - waited)

    # What users call

    @property
    def run(self) -> tinker.TrainingClient:
        """The SDK's client of the run; there once ``fit`` has begun."""
        if self._run is None:
            raise RuntimeError("there is no run yet: call fit")
        return self._run

    @property
    def model(self) -> tinker.SamplingClient:
        """Samples from the trained weights; of the run as it is when this is first asked for after a ``fit``."""
        if self._model is None:
            self._model = self.run.save_weights_and_get_sampling_client().result()
        return self._model

    @property
    def log_dir(self) -> Path:
        """Where metrics, samples and checkpoints are written; there once ``fit`` has begun."""
        return Path(self._log_dir or ".")

    @property
    def tokenizer(self) -> Any:
        """The base model's."""
        return self.run.get_tokenizer()

    def fit(
        self,
        train_data: Any,
        eval_data: Any = None,
        *,
        epochs: int = 1,
        batch_size: int = 8,
        eval_every: int | None = None,
        checkpoint_every: int | None = 20,
        early_stop: EarlyStop | None = None,
        max_steps: int | None = None,
        max_minutes: float | None = None,
        max_usd: float | None = None,
        callbacks: Sequence[Callback] = (),
        resume: bool | str = False,
    ) -> Fitted:
        """Train for ``epochs`` passes over the data.

        train_data, eval_data: a Dataset, or what one is made from (path, URL, list of dicts, HF dataset ...); training
        rows are shuffled by ``seed`` unless a Dataset is given. batch_size: rows per optimizer step.

        eval_every: optimizer steps between evaluations; None: after each epoch; the first is before any step.
        checkpoint_every: steps between checkpoints, None: only at the end. early_stop: see EarlyStop. max_steps counts
        all of the run's steps, max_minutes this call's time, max_usd the run's bill (gradserve only).

        resume: True goes on from the newest checkpoint in ``log_dir`` (or begins, where there is none yet); a
        checkpoint's ``tinker://`` path goes on from that one. Every row is then seen exactly once per epoch.

        Raises ValueError for arguments that do not fit, DataError and BadRow for data, Diverged when the loss or the
        gradient is not finite; tinker's errors for what the service refuses.
        """
        told = {name: value for name, value in locals().items() if name != "self"}
        if epochs < 1 or batch_size < 1:
            raise ValueError(f"epochs is {epochs} and batch_size is {batch_size}: give at least 1 of each")
        for name, every in (("eval_every", eval_every), ("checkpoint_every", checkpoint_every)):
            if every is not None and every < 1:
                raise ValueError(f"{name} is {every}: give at least 1, or None")
        if early_stop is not None and eval_data is None:
            raise ValueError("early_stop looks at evaluations: give eval_data")
        budget = Budget(max_steps, max_minutes, max_usd)
        dataset = train_data if isinstance(train_data, Dataset) else Dataset(train_data, shuffle_seed=self.seed)
        eval_rows = None if eval_data is None else _rows_of(eval_data)
        folder = LogFolder(self._log_dir, self.kind)
        self._log_dir = folder.path
        saved = _chosen(folder, resume)
        if saved is not None:
            dataset = dataset.at(saved.position)
            if early_stop is not None and "early_stop" in saved.state:
                early_stop.restore(saved.state["early_stop"])
        loop = TrainingLoop(
            self, folder, dataset, eval_rows, eval_every, checkpoint_every, early_stop, budget, tuple(callbacks)
        )
        with self._tracked(folder, saved, resume is not False):
            self._open(saved)
            folder.write_manifest(manifest_of(self, self._made_with, told))
            loop.number = self.step
            self._begin()
            try:
                return loop.run(batch_size, epochs, saved)
            finally:
                self._end()

    def evaluate(self, data: Any) -> Metrics:
        """The run as it is now on other data; metrics by name, ``eval/...``."""
        return self._evaluate(_rows_of(data))

    def close(self) -> None:
        """End the server that was started for this trainer; one that was given stays as it is."""
        if self._service is not None and self._given_service is None:
            self._service.close("success")
            self._service = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    # The run

    @property
    def service(self) -> tinker.ServiceClient:
        """The given service; else GRADSERVE_URL, or a server started for this trainer."""
        if self._service is None:
            self._service = connect()
        return self._service

    @contextlib.contextmanager
    def _tracked(self, folder: LogFolder, saved: Saved | None, resumes: bool) -> Iterator[None]:
        """Opened before there is a run: a folder with another training's lines is refused before anything is paid."""
        step = self.step if saved is None else saved.step
        goes_on = step if saved is not None or resumes or self._run is not None else None
        with Tracker(folder.path, sinks=self._sinks, config=self._config(), resume_step=goes_on) as self.tracker:
            try:
                yield
            finally:
                self.tracker = None

    def _config(self) -> dict[str, Any]:
        """What a tracker shows of the settings."""
        rate = self._learning_rate if isinstance(self._learning_rate, float | int | str) else "a function"
        return {"trainer": self.kind, "model": self.base_model, "rank": self.rank, "seed": self.seed,
                "learning_rate": rate, **self._targets, **self._adam}  # fmt: skip

    def _open(self, saved: Saved | None) -> None:
        """Make the run, or take up the checkpoint."""
        self._model = None
        if saved is None:
            if self._run is None:
                self._run = self._new_run()
            return
        self._run = self.service.create_training_client_from_state_with_optimizer(saved.path).result()
        self.step = saved.step
        self._restore(saved.state)

    def _new_run(self) -> tinker.TrainingClient:
        return self.service.create_lora_training_client(
            self.base_model,
            self.rank,
            self.seed,
            train_mlp=self._targets["train_mlp"],
            train_attn=self._targets["train_attn"],
            train_unembed=self._targets["train_unembed"],
        ).result()

    def _save(self, folder: LogFolder, batch: Batch | None, dataset: Dataset, state: Mapping[str, Any]) -> str:
        """A checkpoint of the run as it stands after ``batch`` (None: before any)."""
        position, epoch = (batch.position, batch.epoch) if batch is not None else (dataset.position(), 1)
        path = self.run.save_state(f"step-{self.step:06d}", overwrite=True).result().path
        saved = Saved(
            path=path,
            step=self.step,
            epoch=epoch,
            position=position,
            run_id=str(self.run.model_id),
            state={**self._state(), **state},
            saved_at=time.time(),
        )
        folder.add_checkpoint(saved)
        return path

    def _step_params(self, learning_rate: float) -> types.AdamParams:
        return types.AdamParams(learning_rate=learning_rate, **self._adam)

    def _bill_usd(self) -> float:
        try:
            return float(bill_of(self.run)["amount_usd"])
        except ExtensionError as error:
            raise ValueError(f"max_usd needs a gradserve server, which tells a run's bill: {error}") from error


def _chosen(folder: LogFolder, resume: bool | str) -> Saved | None:
    if resume is False:
        return None
    known = folder.checkpoints
    if resume is True:
        return known[-1] if known else None
    for saved in reversed(known):
        if saved.path == resume:
            return saved
    raise ValueError(
        f"{folder.path}/checkpoints.jsonl does not name {resume}: give the log_dir of the training that made it, whose "
        "place in the data is written there"
    )


def _rows_of(data: Any) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = list(data if isinstance(data, Dataset) else Dataset(data))
    if not rows:
        raise ValueError("eval_data has no rows")
    return rows
