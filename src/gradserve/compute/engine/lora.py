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
import torch.nn.functional as F
from torch import Tensor, nn

from gradserve.compute.engine.fused import RoutedLinear
from gradserve.wire.errors import Invalid
from gradserve.wire.ops import LORA_ALPHA, LoraConfig

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_UNEMBED = ("lm_head",)
TARGETS = frozenset(_ATTENTION + _MLP + _UNEMBED)
"""Last name parts of the modules that can carry an adapter."""

_PREFIX = "base_model.model."
_SUFFIXES = (".lora_A.weight", ".lora_B.weight")

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
        names = [name.removesuffix(a_name) for name in tensors if name.endswith(a_name)]
        if not names or len(tensors) != 2 * len(names):
            raise Invalid("not_an_adapter", "not a LoRA adapter: every module needs one lora_A and one lora_B")
        pairs = {name.removeprefix(_PREFIX): (tensors[name + a_name], tensors[name + b_name]) for name in names}
        ranks = {a.shape[0] for a, _ in pairs.values()}
        if len(ranks) != 1:
            raise Invalid("not_an_adapter", f"all modules of an adapter have one rank, not {sorted(ranks)}")
        return cls(pairs, LORA_ALPHA / ranks.pop())


@dataclass(frozen=True)
class Route:
    """The tokens of a pass that go through ``adapter``: a slice where they lie together, else their indices."""

    adapter: Adapter
    rows: slice | Tensor


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
    """What the wrapped layers of one base ask for the routing of the pass they are in."""

    def __init__(self) -> None:
        self.routing: Routing = []

    @contextmanager
    def routed(self, routing: Routing) -> Iterator[None]:
        """Passes inside the block follow ``routing``. Nests."""
        before, self.routing = self.routing, routing
        try:
            yield
        finally:
            self.routing = before


class LoraLinear(nn.Module):
    """A frozen linear layer, plus each token's own adapter: y = W x + scale * B (A x)."""

    def __init__(self, linear: nn.Linear, name: str, router: Router) -> None:
        super().__init__()
        self.linear = linear
        self._name = name
        self._router = router

    def forward(self, x: Tensor) -> Tensor:
        """x [..., N, in] -> [..., N, out]; only the N axis may be longer than 1."""
        flat = x.reshape(-1, x.shape[-1])
        parts = [
            (part, part.adapter.pairs[self._name]) for part in self._router.routing if self._name in part.adapter.pairs
        ]
        if torch.is_grad_enabled() and parts and _fusible(self.linear, parts):
            segments = [(part.rows, part.adapter.scale) for part, _ in parts]
            factors = [factor for _, pair in parts for factor in pair]
            y: Tensor = RoutedLinear.apply(flat, self.linear.weight, self.linear.bias, segments, *factors)  # type: ignore[no-untyped-call]
        else:
            y = self.linear(flat)
            for part, pair in parts:
                _add(flat, y, part.rows, *pair, part.adapter.scale)
        return y.view(*x.shape[:-1], -1)


def _fusible(linear: nn.Linear, parts: list[tuple[Route, tuple[Tensor, Tensor]]]) -> bool:
    """Whether the written-out derivative holds: a frozen base and adapters of one type, rows that lie together."""
    return not linear.weight.requires_grad and all(
        isinstance(part.rows, slice) and a.dtype == linear.weight.dtype for part, (a, _) in parts
    )


def _add(x: Tensor, y: Tensor, rows: slice | Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """y[rows] += scale * B A x[rows], in place: a second [N, out] per layer would be memory for nothing."""
    if rows == slice(0, x.shape[0]):
        y.addmm_(F.linear(x, a), b.t(), alpha=scale)
    elif isinstance(rows, slice):
        y[rows].addmm_(F.linear(x[rows], a), b.t(), alpha=scale)
    else:
        y.index_add_(0, rows, F.linear(F.linear(x[rows], a), b), alpha=scale)


def wrap(model: nn.Module, router: Router) -> dict[str, nn.Linear]:
    """Put a LoraLinear around every target of ``model`` (changed in place). Returns the targets by module name."""
    targets = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in TARGETS
    }
    for name, linear in targets.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, LoraLinear(linear, name, router))
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
            tensors[f"{_PREFIX}{name}{_SUFFIXES[0]}"] = a
            tensors[f"{_PREFIX}{name}{_SUFFIXES[1]}"] = torch.zeros(linear.out_features, config.rank)
    return tensors


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
