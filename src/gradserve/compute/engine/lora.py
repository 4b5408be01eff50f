"""Low-rank adapters laid over a frozen base (Hu et al. 2021, arXiv:2106.09685), many in one pass.

Tensors carry the names of PEFT's adapter_model.safetensors, so that a weights object *is* such a file.
Rows without an adapter get the base's own output, bit for bit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradserve.compute.engine.fused import EvenlyRoutedLinear, RoutedLinear, even
from gradserve.compute.engine.kernels import Kernels
from gradserve.compute.engine.stacked import ENOUGH, SMALL, Groups, Stack
from gradserve.wire.errors import Invalid
from gradserve.wire.ops import LORA_ALPHA, LoraConfig

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_UNEMBED = ("lm_head",)
TARGETS = frozenset(_ATTENTION + _MLP + _UNEMBED)
"""Last name parts of the modules that can carry an adapter."""

PREFIX = "base_model.model."
"""What the names of PEFT's tensors start with."""

_SUFFIXES = (".lora_A.weight", ".lora_B.weight")

VALUE_HEAD = "value_head."
"""What the names of a run's value head start with: ``weight`` [1, d] and ``bias`` [1]. It is no part of the adapter."""

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Adapter:
    """The pairs (A [R, in], B [out, R]) by module name, e.g. ``model.layers.0.self_attn.q_proj``."""

    pairs: dict[str, tuple[Tensor, Tensor]]
    scale: float

    @classmethod
    def of(cls, tensors: Tensors) -> Adapter:
        """From tensors under PEFT's names. Rank is read from the shapes; the scale is alpha / rank."""
        a_name, b_name = _SUFFIXES
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(VALUE_HEAD)}
        names = [name.removesuffix(a_name) for name in tensors if name.endswith(a_name)]
        if not names or len(tensors) != 2 * len(names):
            raise Invalid("not_an_adapter", "not a LoRA adapter: every module needs one lora_A and one lora_B")
        pairs = {name.removeprefix(PREFIX): (tensors[name + a_name], tensors[name + b_name]) for name in names}
        ranks = {a.shape[0] for a, _ in pairs.values()}
        if len(ranks) != 1:
            raise Invalid("not_an_adapter", f"all modules of an adapter have one rank, not {sorted(ranks)}")
        return cls(pairs, LORA_ALPHA / ranks.pop())


@dataclass(frozen=True)
class Route:
    """The tokens of a pass that go through ``adapter``: a slice where they lie together, else their indices."""

    adapter: Adapter
    rows: slice | Tensor

    @property
    def count(self) -> int:
        """How many tokens."""
        return self.rows.stop - self.rows.start if isinstance(self.rows, slice) else len(self.rows)

    def indices(self, device: torch.device) -> Tensor:
        """int64 [count]"""
        if isinstance(self.rows, slice):
            return torch.arange(self.rows.start, self.rows.stop, device=device)
        return self.rows


Routing = list[Route]


def route(runs: list[tuple[Adapter | None, int]], device: torch.device) -> Routing:
    """The routing of a pass from its runs, (adapter, number of tokens) in token order. Adapters compare by identity."""
    spans: dict[int, list[tuple[int, int]]] = {}
    adapters: dict[int, Adapter] = {}
    at = 0
    for adapter, count in runs:
        if adapter is not None and count:
            adapters[id(adapter)] = adapter
            mine = spans.setdefault(id(adapter), [])
            if mine and mine[-1][1] == at:
                mine[-1] = (mine[-1][0], at + count)
            else:
                mine.append((at, at + count))
        at += count
    return [Route(adapters[key], _rows(mine, device)) for key, mine in spans.items()]


def _rows(spans: list[tuple[int, int]], device: torch.device) -> slice | Tensor:
    if len(spans) == 1:
        return slice(*spans[0])
    return torch.cat([torch.arange(a, b, device=device) for a, b in spans])


class Router:
    """What the wrapped layers of one base ask for the routing of the pass they are in.

    Many small groups of a pass without gradients go through a stack of their adapters (stacked.py), the other routes
    one by one.
    """

    def __init__(self, kernels: Kernels, device: torch.device) -> None:
        self._kernels = kernels
        self._device = device
        self._routing: Routing = []
        self._groups: Groups | None = None
        self._stack: Stack | None = None

    @contextmanager
    def routed(self, routing: Routing) -> Iterator[None]:
        """Passes inside the block follow ``routing``. Nests."""
        before = self._routing, self._groups
        self._routing, self._groups = self._plan(routing)
        try:
            yield
        finally:
            self._routing, self._groups = before

    def add(self, name: str, x: Tensor, y: Tensor) -> None:
        """y += what the adapters of the pass have to say at module ``name``; x [N, in], y [N, out]."""
        if self._groups is not None:
            self._groups.add(name, x, y)
        for route in self._routing:
            pair = route.adapter.pairs.get(name)
            if pair is not None:
                self._kernels.add_low_rank(y, x, route.rows, *pair, route.adapter.scale)

    def fusible(self, name: str, weight: Tensor) -> list[tuple[Route, tuple[Tensor, Tensor]]]:
        """The routes of a module with their A and B, where a written-out derivative holds for all of them, else none.

        It does for a frozen base and adapters of its own type whose rows lie together.
        """
        if not torch.is_grad_enabled() or not self._kernels.groups_freely or weight.requires_grad:
            return []
        found = [(route, route.adapter.pairs[name]) for route in self._routing if name in route.adapter.pairs]
        fits = all(isinstance(route.rows, slice) and a.dtype == weight.dtype for route, (a, _) in found)
        return found if fits else []

    def _plan(self, routing: Routing) -> tuple[Routing, Groups | None]:
        small = [route for route in routing if route.count <= SMALL]
        if torch.is_grad_enabled() or not self._kernels.groups_freely or len(small) < ENOUGH:
            return routing, None
        if self._stack is None or not self._stack.serves(small):
            self._stack = Stack([route.adapter for route in small])
        large = [route for route in routing if route.count > SMALL]
        return large, Groups.of(self._stack, small, self._device)


class LoraLinear(nn.Module):
    """A frozen linear layer, plus each token's own adapter: y = W x + scale * B (A x)."""

    def __init__(self, linear: nn.Linear, name: str, router: Router, kernels: Kernels) -> None:
        super().__init__()
        self.linear = linear
        self._name = name
        self._router = router
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """x [..., N, in] -> [..., N, out]; only the N axis may be longer than 1."""
        flat = x.reshape(-1, x.shape[-1])
        weight, bias = self.linear.weight, self.linear.bias
        parts = self._router.fusible(self._name, weight)
        if parts:
            segments = [(route.rows, route.adapter.scale) for route, _ in parts if isinstance(route.rows, slice)]
            factors = [factor for _, pair in parts for factor in pair]
            routed = EvenlyRoutedLinear if even(segments, factors) else RoutedLinear
            y: Tensor = routed.apply(flat, weight, bias, segments, *factors)  # type: ignore[no-untyped-call]
        else:
            y = self._kernels.linear(flat, weight, bias)
            self._router.add(self._name, flat, y)
        return y.view(*x.shape[:-1], -1)


def wrap(model: nn.Module, router: Router, kernels: Kernels) -> dict[str, nn.Linear]:
    """Put a LoraLinear around every target of ``model`` (changed in place). Returns the targets by module name."""
    targets = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in TARGETS
    }
    for name, linear in targets.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, LoraLinear(linear, name, router, kernels))
    return targets


def init_adapter(targets: dict[str, nn.Linear], config: LoraConfig) -> Tensors:
    """Fresh tensors under PEFT's names: A uniform as ``nn.Linear`` (and PEFT) draw it, B zero.

    Each A has a stream of its own, from (seed, module name), so that it doesn't depend on the other modules.
    """
    wanted = (
        (_ATTENTION if config.train_attn else ())
        + (_MLP if config.train_mlp else ())
        + (_UNEMBED if config.train_unembed else ())
    )
    if not wanted:
        raise Invalid("no_targets", "at least one of train_attn, train_mlp and train_unembed must be true")
    if config.rank < 1:
        raise Invalid("bad_rank", f"the rank of an adapter is at least 1, not {config.rank}")
    tensors: Tensors = {}
    for name, linear in targets.items():
        if name.rpartition(".")[2] in wanted:
            a = torch.empty(config.rank, linear.in_features)
            nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=_generator(config.seed, name))
            a_name, b_name = tensor_names(name)
            tensors[a_name], tensors[b_name] = a, torch.zeros(linear.out_features, config.rank)
    return tensors


def init_value_head(hidden: int) -> Tensors:
    """A head that says 0 of every state: its first targets decide where it goes."""
    return {f"{VALUE_HEAD}weight": torch.zeros(1, hidden), f"{VALUE_HEAD}bias": torch.zeros(1)}


def tensor_names(module: str) -> tuple[str, str]:
    """PEFT's names of a module's A and B."""
    a_suffix, b_suffix = _SUFFIXES
    return f"{PREFIX}{module}{a_suffix}", f"{PREFIX}{module}{b_suffix}"


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
