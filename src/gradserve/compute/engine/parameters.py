"""The parameters of a loaded model by their Hugging Face names, and exchanging them for one pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from gradserve.compute.engine.lora import PREFIX, Tensors
from gradserve.wire.errors import Invalid


def is_full(weights: Tensors) -> bool:
    """Whether a weights object holds a model's parameters; the names of an adapter's tensors start with PREFIX."""
    return bool(weights) and not any(name.startswith(PREFIX) for name in weights)


class Parameters:
    """Made before adapters are laid over ``model``, so that the names are those of its checkpoint files.

    A tied parameter hangs in several modules and goes by its first name (transformers saves it so).
    """

    def __init__(self, model: nn.Module) -> None:
        self._own: Tensors = dict(model.named_parameters())
        self._shapes = {name: parameter.shape for name, parameter in self._own.items()}
        names = {id(parameter): name for name, parameter in self._own.items()}
        self._places: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in self._own}
        for module in model.modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                self._places[names[id(parameter)]].append((module, leaf))

    def tensors(self) -> Tensors:
        """The model's own, float32."""
        return {name: parameter.detach().float() for name, parameter in self._own.items()}

    @contextmanager
    def replaced(self, tensors: Tensors) -> Iterator[None]:
        """Passes inside the block compute with ``tensors``. Raises Invalid when ``check`` does."""
        self.check(tensors)
        self._put(tensors)
        try:
            yield
        finally:
            self._put(self._own)

    def check(self, tensors: Tensors) -> None:
        """Raises Invalid unless they are this model's by name and shape."""
        given = {name: tensor.shape for name, tensor in tensors.items()}
        if given != self._shapes:
            names = self._shapes.keys() | given.keys()
            wrong = sorted(name for name in names if self._shapes.get(name) != given.get(name))
            raise Invalid(
                "not_this_model", f"these weights are not the base model's parameters: {wrong[0]} is missing or differs"
            )

    def _put(self, tensors: Tensors) -> None:
        for name, places in self._places.items():
            for module, leaf in places:
                module._parameters[leaf] = tensors[name]  # type: ignore[assignment]  # any tensor does for a pass
