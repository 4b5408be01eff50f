"""A PEFT adapter from outside -> weights that a run of ours could have: the same modules, one rank, our scale.

Everything that PEFT would compute otherwise is folded exactly into B or refused; nothing is dropped.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gradserve.compute.catalog import BaseFacts, parameter_shapes, read_parameter
from gradserve.compute.checkpoints import ATTENTION, MLP, UNEMBED, target_modules
from gradserve.compute.safetensors_file import Arrays, BadFile, dump, load
from gradserve.wire.errors import Invalid, Unsupported
from gradserve.wire.ops import LORA_ALPHA, LoraConfig

_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_COPY = ".base_layer.weight"
_HALF_ULP = 2.0**-8
"""Relative; of a bfloat16."""
_HEAD, _EMBEDDING = "lm_head", "embed_tokens"

_NO_EFFECT = frozenset(
    {
        # about the file, not about what it computes
        "base_model_name_or_path", "revision", "task_type", "auto_mapping", "peft_version", "inference_mode",
        "runtime_config", "megatron_core", "qalora_group_size", "ensure_weight_tying",
        # which modules were wrapped: the tensors say it
        "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
        # how they were made: dropout acts only while PEFT trains
        "lora_dropout", "eva_config", "lora_ga_config",
    }
)  # fmt: skip
"""Keys of adapter_config.json that do not change what a finished adapter computes."""

_READ = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "init_lora_weights", "bias"})

_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal", "lora_ga")
"""Values of init_lora_weights that leave the base's weights alone (PiSSA, OLoRA, CorDA and LoftQ change them)."""

Shapes = dict[str, tuple[int, int]]
"""(out, in) of the linear layers that can carry an adapter, by module name."""


class Imported(NamedTuple):
    """The adapters that a run would have, the bytes of its weights object, and the modules that had no adapter.

    ``added`` ones got the adapter of a new run: B is zero, so the function is the same.
    """

    lora: LoraConfig
    weights: bytes
    added: list[str]

    @property
    def notice(self) -> str | None:
        """What whoever trains on should know of the added modules."""
        if not self.added:
            return None
        kinds = ", ".join(sorted({name.rpartition(".")[2] for name in self.added}))
        return (
            f"The adapter has nothing on {len(self.added)} modules ({kinds}) of the groups that it covers, and runs "
            "train whole groups: these modules got fresh adapters whose B is zero. What the model computes is the "
            "same; training on from here trains them too."
        )


def imported(config: dict[str, Any], weights: bytes, base: BaseFacts, max_rank: int) -> Imported:
    """What becomes of an adapter. Raises Invalid or Unsupported."""
    scale = _scale(config)
    tensors = _without_copies(_tensors(weights), base)
    rank = _rank(config, max_rank)
    shapes = _shapes(base)
    modules = _modules(tensors)
    lora = _flags(modules, shapes, rank)
    _check_shapes(tensors, shapes, rank, base)
    folded = _folded(tensors, scale / (LORA_ALPHA / rank))
    _check_finite(folded)
    added = sorted({name for name in shapes if name.rpartition(".")[2] in target_modules(lora)} - modules)
    return Imported(lora, dump(folded | _fresh(added, shapes, lora)), added)


def _scale(config: dict[str, Any]) -> float:
    """What PEFT multiplies B A by: alpha / r, or alpha / sqrt(r) with use_rslora (arXiv:2312.03732)."""
    if config.get("peft_type") != "LORA":
        raise _unsupported("peft_type", config.get("peft_type"), "Only LoRA adapters are imported.")
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        fix = "Such adapters change the base's weights too. Convert it to a plain LoRA with PEFT first."
        raise _unsupported("init_lora_weights", config["init_lora_weights"], fix)
    if config.get("bias", "none") != "none":
        raise _unsupported("bias", config["bias"], "Runs here train no biases. Only bias: none is imported.")
    for key in sorted(config.keys() - _NO_EFFECT - _READ):
        if config[key]:
            raise _unsupported(key, config[key], "Only plain LoRA on linear layers is imported.")
    rank, alpha = _number(config, "r"), _number(config, "lora_alpha")
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _number(config: dict[str, Any], key: str) -> float:
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not (math.isfinite(value) and value > 0):
        detail = f"config.{key} is {value!r}; it must be a positive number."
        raise Invalid("adapter.config", detail, field=f"config.{key}")
    return value


def _rank(config: dict[str, Any], max_rank: int) -> int:
    key = "r"
    rank = _number(config, key)
    if not (rank == int(rank) and rank <= max_rank):
        field = f"config.{key}"
        raise Invalid("lora.rank", f"{field} is {rank}; this server takes 1 to {max_rank}.", field=field)
    return int(rank)


def _unsupported(key: str, value: Any, fix: str) -> Unsupported:
    return Unsupported("unsupported.adapter", f"config.{key} is {value!r}.", field=f"config.{key}", fix=fix)


def _tensors(weights: bytes) -> Arrays:
    try:
        return load(weights)
    except BadFile as error:
        raise Invalid("adapter.file", f"weights is not a usable safetensors file: {error}.", field="weights") from error


def _without_copies(tensors: Arrays, base: BaseFacts) -> Arrays:
    """PEFT saves the head or embedding that an adapter lies on with it. Only a copy of the base's own can be left out.

    Raises Invalid for one that differs by more than rounding to 16 bits.
    """
    kept = dict(tensors)
    for name in sorted(name for name in tensors if name.endswith(_COPY)):
        module = name.removeprefix(_PREFIX).removesuffix(_COPY)
        own = read_parameter(Path(base.path), f"{module}.weight")
        if own is None and module == _HEAD:
            own = read_parameter(Path(base.path), f"model.{_EMBEDDING}.weight")
        copy = kept.pop(name)
        if own is None or own.shape != copy.shape or not np.allclose(copy, own, rtol=_HALF_ULP, atol=_HALF_ULP**2):
            raise Invalid(
                "adapter.tensors",
                f"{name} is not what {base.name} has there.",
                field="weights",
                fix="An adapter that comes with other base weights can't be imported; or it belongs to another base.",
            )
    return kept


def _modules(tensors: Arrays) -> set[str]:
    """Names of the modules that have an A and a B. Raises Invalid when there is anything else."""
    modules = {name.removeprefix(_PREFIX).removesuffix(_A) for name in tensors if name.endswith(_A)}
    expected = {f"{_PREFIX}{module}{suffix}" for module in modules for suffix in (_A, _B)}
    if odd := sorted(tensors.keys() ^ expected):
        raise Invalid(
            "adapter.tensors",
            f"tensor {odd[0]} is {'not known' if odd[0] in tensors else 'missing'}.",
            field="weights",
            fix=f"Every module has one {_PREFIX}<module>{_A} and one {_B.lstrip('.')}, and there is nothing else.",
        )
    return modules


def _shapes(base: BaseFacts) -> Shapes:
    """Of the base's layers that can carry an adapter; a tied head has the embedding's shape."""
    found = {name.removesuffix(".weight"): shape for name, shape in parameter_shapes(Path(base.path)).items()}
    if not found:
        raise Unsupported(
            "unsupported.adapter",
            f"The weight files of {base.name} are not safetensors, so the adapter can't be compared with them.",
            field="base",
        )
    found.setdefault(_HEAD, found[f"model.{_EMBEDDING}"])
    wanted = (*ATTENTION, *MLP, *UNEMBED)
    return {name: (s[0], s[1]) for name, s in found.items() if name.rpartition(".")[2] in wanted and len(s) == 2}


def _flags(modules: set[str], shapes: Shapes, rank: int) -> LoraConfig:
    """The protocol trains whole groups of layers: those that the adapter has anything of."""
    if unknown := sorted(modules - shapes.keys()):
        raise Invalid(
            "adapter.modules",
            f"the base has no {unknown[0]} that can carry an adapter.",
            field="weights",
            fix=f"Adapters go on {', '.join((*ATTENTION, *MLP, *UNEMBED))}.",
        )
    if not modules:
        raise Invalid("adapter.modules", "there is no adapter in it.", field="weights")
    kinds = {name.rpartition(".")[2] for name in modules}
    return LoraConfig(
        rank,
        0,
        train_attn=not kinds.isdisjoint(ATTENTION),
        train_mlp=not kinds.isdisjoint(MLP),
        train_unembed=not kinds.isdisjoint(UNEMBED),
    )


def _fresh(modules: list[str], shapes: Shapes, lora: LoraConfig) -> Arrays:
    """Adapters as a new run has them: A uniform in +-1/sqrt(in), by a stream of its own for each module, and B zero.

    The bits are those of PCG64 itself, which NumPy never changes, so that an import gives the same again for ever.
    """
    fresh: Arrays = {}
    for module in modules:
        outputs, inputs = shapes[module]
        digest = hashlib.sha256(f"{lora.seed}:{module}".encode()).digest()
        draws = np.random.PCG64(int.from_bytes(digest[:8], "little")).random_raw(lora.rank * inputs)
        unit = (draws >> np.uint64(40)).astype(np.float32) / np.float32(2**24)  # 24 bits: exact in [0, 1)
        a = (2 * unit - 1) / np.float32(math.sqrt(inputs))
        fresh[f"{_PREFIX}{module}{_A}"] = a.reshape(lora.rank, inputs)
        fresh[f"{_PREFIX}{module}{_B}"] = np.zeros((outputs, lora.rank), np.float32)
    return fresh


def _check_shapes(tensors: Arrays, shapes: Shapes, rank: int, base: BaseFacts) -> None:
    for module, (outputs, inputs) in shapes.items():
        for suffix, wanted in ((_A, (rank, inputs)), (_B, (outputs, rank))):
            found = tensors.get(f"{_PREFIX}{module}{suffix}")
            if found is not None and found.shape != wanted:
                raise Invalid(
                    "adapter.shape",
                    f"{_PREFIX}{module}{suffix} has shape {list(found.shape)}; rank {rank} on {base.name} needs "
                    f"{list(wanted)}.",
                    field="weights",
                )


def _check_finite(tensors: Arrays) -> None:
    for name, array in tensors.items():
        if not np.isfinite(array).all():
            raise Invalid("adapter.not_finite", f"{name} has values that are not finite in float32.", field="weights")


def _folded(tensors: Arrays, factor: float) -> Arrays:
    """The same product under our scale: B times ``factor``, rounded once. What gets too large becomes infinite."""
    with np.errstate(over="ignore"):
        return {
            name: (array.astype(np.float64) * factor).astype(np.float32) if name.endswith(_B) else array
            for name, array in tensors.items()
        }
