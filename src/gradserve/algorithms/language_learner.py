"""``fit`` on a language model: the loss as a graph that travels in each request of the public SDK."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import tinker
from tinker import types

from gradserve.algorithms.learner import Answer
from gradserve.algorithms.optimizers import Optimizer
from gradserve.client.state import get_client_state, set_client_state
from gradserve.compiler.losses import Loss, capture_batch_loss
from gradserve.wire.ops import AdamParams

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_TOKENS, _TARGETS, _LOGPROBS = "tokens", "target_tokens", "logprobs"


class LanguageModel:
    """What a loss gets for a model: ``model(batch)`` are the log-probs [B, T] of the targets."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, batch: Mapping[str, Tensor]) -> Tensor:
        """``batch["logprobs"]``, differentiable."""
        return batch[_LOGPROBS]


class LanguageLearner:
    """``loss_fn(model, batch)`` on a batch of rows; adapters of ``rank`` are trained.

    A row is a dict: ``tokens`` [T] and ``target_tokens`` [T], and inputs of the loss: numbers, [T] or [T, K]. The loss
    gets them as [B], [B, T] or [B, T, K], padded with 0, float32 or int64, and with them ``logprobs`` [B, T] of the
    targets, ``mask`` [B, T] (1 at tokens, 0 at padding) and ``lengths`` [B]. A row's own ``logprobs`` are the batch's
    ``old_logprobs``. ``inputs`` declares further ones, as for ``gradserve.loss``: {"entropy": "float32[token]"}.
    """

    def __init__(
        self,
        service: tinker.ServiceClient,
        name: str,
        loss_fn: Any,
        inputs: Mapping[str, str],
        rank: int,
        seed: int,
        resume: str | None,
    ) -> None:
        self._name, self._loss_fn, self._inputs = name, loss_fn, dict(inputs)
        self._loss: Loss | None = None
        self._resumed = resume is not None
        if resume is None:
            self._run = service.create_lora_training_client(base_model=name, rank=rank, seed=seed).result()
        else:
            self._run = service.create_training_client_from_state_with_optimizer(resume).result()

    def step(self, batch: Any, optimizer: Optimizer, number: int) -> Answer:
        """See Learner."""
        if not isinstance(batch, Sequence) or not batch or not isinstance(batch[0], Mapping):
            raise TypeError(f"data_loader must give lists of rows for a language model, not {type(batch).__name__}")
        rule = optimizer.rule(number)
        if not isinstance(rule, AdamParams) or optimizer.coupled_decay:
            raise ValueError(f"language models are trained with adamw, not {optimizer.name}")
        rows = [{name: _array(value) for name, value in row.items()} for row in batch]
        if self._loss is None:
            self._loss = self._captured(rows[0])
        gradient = self._run.forward_backward([_datum(row) for row in rows], self._loss)  # type: ignore[arg-type]
        stepped = self._run.optim_step(types.AdamParams(**msgspec.structs.asdict(rule)))

        def answer() -> dict[str, float]:
            metrics = {name.partition(":")[0]: value for name, value in gradient.result().metrics.items()}
            return metrics | (stepped.result().metrics or {})

        return answer

    def save(self, name: str, position: bytes) -> str:
        """See Learner."""
        set_client_state(self._run, position)
        return self._run.save_state(name, overwrite=True).result().path

    def position(self) -> bytes:
        """See Learner."""
        return get_client_state(self._run) if self._resumed else b""

    def model(self) -> tinker.TrainingClient:
        """The SDK's client of the run: to sample from it, or to train on."""
        return self._run

    def _captured(self, row: Mapping[str, NDArray[Any]]) -> Loss:
        """The loss for rows like this one."""
        inputs = {"logprobs": "float32[token]", "mask": "float32[token]", "lengths": "int64[row]"}
        for name, value in row.items():
            if name != _TOKENS:
                inputs["old_logprobs" if name == _LOGPROBS else name] = _declaration(value)
        model = LanguageModel(self._name)
        return capture_batch_loss(lambda batch: self._loss_fn(model, batch), inputs | self._inputs, self._loss_fn)


def _array(value: Any) -> NDArray[Any]:
    array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int64)


def _declaration(value: NDArray[Any]) -> str:
    sizes = ["row", "token", f"token, {value.shape[-1] if value.ndim else 0}"]
    return f"{value.dtype.name}[{sizes[value.ndim]}]"


def _datum(row: Mapping[str, NDArray[Any]]) -> types.Datum:
    inputs = {name: types.TensorData.from_numpy(np.atleast_1d(value)) for name, value in row.items() if name != _TOKENS}
    return types.Datum(model_input=types.ModelInput.from_ints(row[_TOKENS].tolist()), loss_fn_inputs=inputs)
