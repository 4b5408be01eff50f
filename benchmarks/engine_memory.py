"""Peak memory of one training step above the weights: plain transformers + peft against the engine's plans.

Each figure comes from a process of its own: resident memory's high-water mark during a second, identical step, less
what was resident before the first (Linux only). The loss and the gradient's norm must agree between all of them.

    python -m benchmarks.engine_memory --model DIR --out benchmarks/baselines/NAME.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from gradserve.compute.engine.attention import NAME
from gradserve.compute.engine.base import Base
from gradserve.compute.engine.kernels import FAST
from gradserve.compute.engine.lora import TARGETS, init_adapter
from gradserve.compute.engine.memory_plan import PLANS, Dimensions, Plan, peak_bytes
from gradserve.compute.engine.train import forward_backward, outline, prepare
from gradserve.wire.ops import LORA_ALPHA, LoraConfig

from .engine_train import RANK, rows_of, sequences
from .run import conditions

MIB = 1 << 20
AGREE = 1e-4
"""Relative; both are sums over a million numbers."""


def naive(path: str, vocab: int, lengths: list[int]) -> dict[str, float]:
    """One batch, all logits at once, nothing computed twice."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    config = PeftConfig(r=RANK, lora_alpha=LORA_ALPHA, target_modules=sorted(TARGETS), task_type="CAUSAL_LM")
    plain = _model(path, vocab, "sdpa")
    linears = {name: module for name, module in plain.named_modules() if isinstance(module, torch.nn.Linear)}
    initial = init_adapter(linears, LoraConfig(RANK, 0))
    model = get_peft_model(plain, config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(initial[name.replace(".default.", ".")])
    ids = torch.stack([torch.from_numpy(tokens).long() for tokens in sequences(lengths, vocab)])
    found: dict[str, float] = {}

    def step() -> None:
        model.zero_grad()
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten(), reduction="sum")
        torch.autograd.backward(loss)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.update(loss=loss.item(), gradient_norm=_norm(gradients))

    return _peak_of(step) | found


def ours(path: str, vocab: int, lengths: list[int], plan: Plan) -> dict[str, float]:
    """The engine under one plan, with what its memory model predicts."""
    base = Base("base", path, _model(path, vocab, NAME), torch.device("cpu"), FAST)
    job = prepare(base, init_adapter(base.targets, LoraConfig(RANK, 0)), rows_of(lengths, vocab), "cross_entropy", {})
    found: dict[str, float] = {}

    def step() -> None:
        (computed,) = forward_backward(base, [job], True, plan)
        if not isinstance(computed, tuple):
            raise computed
        result, gradient = computed
        assert gradient is not None
        found.update(loss=result.metrics["loss:sum"], gradient_norm=_norm(list(gradient.values())))

    predicted = peak_bytes(Dimensions.of(base.config), outline([job], True), plan)
    return _peak_of(step) | found | {"predicted_mib": round(predicted / MIB, 1)}


def _model(path: str, vocab: int, attention: str) -> Any:
    """The model of a directory with a vocabulary of another size; the same random weights each time."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(path, vocab_size=vocab, attn_implementation=attention)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)


def _norm(gradients: list[torch.Tensor]) -> float:
    squares = [gradient.double().square().sum() for gradient in gradients]
    return torch.stack(squares).sum().sqrt().item()


def _peak_of(step: Any) -> dict[str, float]:
    before = _status("VmRSS")
    step()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    step()
    return {"peak_mib": round((_status("VmHWM") - before) / MIB, 1)}


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def _apart(function: Any, *arguments: Any) -> dict[str, float]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        found: dict[str, float] = pool.submit(function, *arguments).result()
        return found


def measure(path: str, vocab: int, lengths: list[int]) -> dict[str, Any]:
    """All figures; raises when a plan changes the numbers."""
    found: dict[str, Any] = {"naive": _apart(naive, path, vocab, lengths)}
    reference = found["naive"]
    for plan in PLANS:
        name = ("layers twice, " if plan.recompute else "") + (
            f"head by {plan.head_positions}" if plan.head_positions else "head whole"
        )
        figures = _apart(ours, path, vocab, lengths, plan)
        for key in ("loss", "gradient_norm"):
            if abs(figures[key] / reference[key] - 1) > AGREE:
                raise RuntimeError(f"{name}: {key} is {figures[key]}, naively {reference[key]}")
        figures["of_naive"] = round(figures["peak_mib"] / reference["peak_mib"], 3)
        found[name] = figures
        print(name, figures, flush=True)
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure the peak memory of a training step.")
    parser.add_argument("--model", required=True, help="a model's directory; its shape is used, not its weights")
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--out", type=Path, help="file to write")
    arguments = parser.parse_args()
    shape = {"vocab": arguments.vocab, "rows": arguments.rows, "length": arguments.length, "rank": RANK}
    figures = measure(arguments.model, arguments.vocab, [arguments.length] * arguments.rows)
    if arguments.out:
        record = {"model": Path(arguments.model).name, **shape, **conditions(), **figures}
        arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
