"""``fit`` on a torch module: the loss as a graph of its parameters, kept on the server by its hash."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradserve.algorithms.learner import Answer
from gradserve.algorithms.optimizers import Optimizer
from gradserve.algorithms.weights import packed, trained, unpacked
from gradserve.client.modules import ModuleClient
from gradserve.client.state import put_state, state_of
from gradserve.compiler import CaptureError
from gradserve.compiler.modules import capture_module, capture_program
from gradserve.wire import graph as ir

if TYPE_CHECKING:
    import tinker
    from torch import Tensor, nn


class ModuleLearner:
    """``loss_fn(module, batch) -> loss`` or ``-> (loss, metrics)``; a batch is a dict of tensors or arrays.

    Dimension 0 of each is the batch's and may differ from batch to batch. The loss is captured with the first batch.
    The run's own graph is the module's forward pass where that can be seen, else the loss.
    """

    def __init__(self, service: tinker.ServiceClient, module: nn.Module, loss_fn: Any, resume: str | None) -> None:
        self._service, self._module, self._loss_fn = service, module, loss_fn
        self._run = None if resume is None else ModuleClient.load(service, resume)
        self._loss: str | None = None

    def step(self, batch: Any, optimizer: Optimizer, number: int) -> Answer:
        """See Learner."""
        if not isinstance(batch, Mapping):
            raise TypeError(f"data_loader must give dicts of tensors for a module, not {type(batch).__name__}")
        tensors = {name: torch.as_tensor(value) for name, value in batch.items()}
        run, loss = self._ready(tensors)
        arrays = {name: np.asarray(tensor.detach().cpu()) for name, tensor in tensors.items()}
        gradient = run.apply(arrays, loss, backward=True)
        stepped = run.optim_step(optimizer.rule(number), coupled_decay=optimizer.coupled_decay)

        def answer() -> dict[str, float]:
            metrics: dict[str, float] = dict(gradient.result().metrics)
            of_step: dict[str, float] = stepped.result()["metrics"]
            return {"loss": metrics.pop("loss:sum")} | metrics | of_step

        return answer

    def save(self, name: str, position: bytes) -> str:
        """See Learner."""
        run = self._begun()
        put_state(self._service.holder, run.run_id, position)
        path: str = run.save(name, overwrite=True).result()["path"]
        return path

    def position(self) -> bytes:
        """See Learner."""
        return state_of(self._service.holder, self._run.run_id) if self._run is not None else b""

    def model(self) -> nn.Module:
        """A copy of the module with the trained weights."""
        return trained(self._module, unpacked(self._begun().weights()))

    def _ready(self, batch: Mapping[str, Tensor]) -> tuple[ModuleClient, str]:
        """The run and its loss's hash; made with the first batch."""
        if self._run is None or self._loss is None:
            graph, tensors = capture_program(self._loss_fn, self._module, batch)
            text = ir.encode(graph).decode()
            if self._run is None:
                base = self._forward(batch) or graph
                self._run = ModuleClient.create(self._service, ir.encode(base).decode(), packed(tensors))
            self._loss = self._run.keep(text)
        return self._run, self._loss

    def _forward(self, batch: Mapping[str, Tensor]) -> ir.Graph | None:
        """The graph of the module itself, as the loss calls it first, so that the run can be exported as what it is.

        None where the loss does not call it as a whole on tensors, or its output can't be a graph's.
        """
        calls: list[dict[str, Any]] = []
        module = copy.deepcopy(self._module)  # a pass may leave traces in buffers

        def remember(called: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            calls.append(dict(zip(inspect.signature(called.forward).parameters, args, strict=False)) | given)

        module.register_forward_pre_hook(remember, with_kwargs=True)
        with torch.no_grad():
            self._loss_fn(module, dict(batch))
        if not calls or not all(isinstance(value, torch.Tensor) for value in calls[0].values()):
            return None
        try:
            return capture_module(self._module, calls[0])[0]
        except CaptureError:
            return None

    def _begun(self) -> ModuleClient:
        if self._run is None:
            raise ValueError("data_loader gave no batch: there is nothing to train on")
        return self._run
