"""A frozen base: loaded once, shared by every run and request of this worker, never changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from gradserve.compute.catalog import FAMILIES, ModelUnusable
from gradserve.compute.engine import lora
from gradserve.compute.engine.attention import NAME, Filled, Layout
from gradserve.compute.engine.fused import fuse
from gradserve.compute.engine.kernels import FAST, Kernels
from gradserve.compute.engine.parameters import Parameters
from gradserve.compute.tasks import BaseSpec
from gradserve.wire.errors import Invalid

_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Rotary schemes that rescale by the longest sequence of a pass: a row would depend on its neighbours."""


SMALL_HIDDEN = 256
"""Models up to this width compute on one thread. Two threads on the products of a model of 128 gain 1.3x on an idle
machine, but next to a client's and a server's processes they wait for each other: a step took 1.5 times as long, and
1.7 times the processor."""


class Base:
    """A causal language model with every target wrapped for adapters.

    ``context`` counts prompt and generated tokens; ``vocab`` is the number of logits; ``dtype`` that of weights and
    activations (adapters are float32 always). A pass uses ``threads``, but one where the model is small.
    """

    def __init__(
        self, name: str, path: str, model: Any, device: torch.device, kernels: Kernels, threads: int = 1
    ) -> None:
        self.name = name
        self.device = device
        self.kernels = kernels
        self.dtype: torch.dtype = model.dtype
        self._threads = 1 if model.config.hidden_size <= SMALL_HIDDEN else threads
        self.config = model.config
        self.vocab: int = self.config.vocab_size
        self.context: int = self.config.max_position_embeddings
        self._path = path
        self._model = model
        self._router = lora.Router(kernels, device)
        self._tokenizer: Any = None
        self._recompute = False
        self.parameters = Parameters(model)
        self.targets: dict[str, nn.Linear] = lora.wrap(model, self._router, kernels)
        self.routed = self._router.routed
        fuse(model)
        for layer in model.model.layers:
            self._make_recomputable(layer)

    @classmethod
    def load(cls, spec: BaseSpec, device: torch.device, dtype: torch.dtype, kernels: Kernels, threads: int = 1) -> Base:
        """Read a Hugging Face directory. Raises ModelUnusable when this engine would compute it wrongly."""
        config = AutoConfig.from_pretrained(spec.path, local_files_only=True)
        _check(spec.name, config)
        logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(
            spec.path, config=config, dtype=dtype, local_files_only=True, attn_implementation=NAME
        )
        model.to(device).eval().requires_grad_(False)
        if kernels.groups_freely and model.dtype == torch.float32 and device.type == "cpu":
            _store_by_input(model)
        return cls(spec.name, spec.path, model, device, kernels, threads)

    def hidden(self, tokens: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """int64 [N] ids and positions -> final hidden states [N, hidden]."""
        if torch.get_num_threads() != self._threads:  # a base of another size had the last pass
            torch.set_num_threads(self._threads)
        count = tokens.shape[0]
        missing = self.kernels.pad(count) - count
        if missing:
            tokens, positions = F.pad(tokens, (0, missing)), F.pad(positions, (0, missing))
            layout = Filled(layout, count)
        out = self._model.model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, layout=layout)
        states: Tensor = out.last_hidden_state[0, :count]
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, hidden] -> float32 [M, V]. Follows the current routing, whose rows are those of ``hidden``."""
        logits: Tensor = self._model.lm_head(hidden)
        return logits.float()

    @contextmanager
    def recomputing(self, on: bool) -> Iterator[None]:
        """While ``on``, a backward pass keeps only each layer's input and computes the rest again."""
        self._recompute = on
        try:
            yield
        finally:
            self._recompute = False

    def _make_recomputable(self, layer: nn.Module) -> None:
        forward = layer.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._recompute and torch.is_grad_enabled():
                return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
            return forward(*args, **kwargs)

        layer.forward = run

    @property
    def tokenizer(self) -> Any:
        """The base's tokenizer, read on first use."""
        if self._tokenizer is None:
            self._tokenizer = AutoTokenizer.from_pretrained(self._path, local_files_only=True)
        return self._tokenizer


class Bases:
    """The bases of a worker by name, each loaded when first asked for, but for those that came ``loaded``."""

    def __init__(
        self,
        specs: tuple[BaseSpec, ...],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        kernels: Kernels = FAST,
        loaded: dict[str, Base] | None = None,
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._device = device
        self._dtype = dtype
        self._kernels = kernels
        self._threads = torch.get_num_threads()  # before any base has changed it
        self._loaded = dict(loaded or {})

    def get(self, name: str) -> Base:
        """Raises Invalid for a name this worker does not serve."""
        if name not in self._loaded:
            if name not in self._specs:
                raise Invalid("unknown_base", f"this worker has no base model {name!r}")
            self._loaded[name] = Base.load(self._specs[name], self._device, self._dtype, self._kernels, self._threads)
        return self._loaded[name]


def _store_by_input(model: Any) -> None:
    """Lay the layers' matrices out as [in, out] in memory; to all who use them they are [out, in] as before.

    The library need not transpose them then: products of 8 to 128 rows (decoding) take 0.75 to 0.95 of the time, those
    of a thousand (training, both ways) as long as before. Not the head, which may also be the embedding, read by row.
    """
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.t().contiguous().t()


def _check(name: str, config: Any) -> None:
    if config.model_type not in FAMILIES:
        raise ModelUnusable(f"model {name!r}: model_type {config.model_type!r} is not one of {', '.join(FAMILIES)}")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in _BATCH_DEPENDENT_ROPE:
        raise ModelUnusable(f"model {name!r}: rope_type {rope!r} makes a sequence depend on its batch")
