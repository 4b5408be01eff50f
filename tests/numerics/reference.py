"""The same numbers the ordinary way: transformers and peft on a padded batch, losses written out in plain torch."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from gradserve.wire.data import Row, tokens_of
from gradserve.wire.ops import LORA_ALPHA


def load(directory: Path, attention: str = "eager") -> Any:
    """The bare model."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation=attention).eval()


def load_peft(directory: Path, adapter_file: Path, folder: Path, rank: int) -> Any:
    """The model with our weights object as PEFT's own adapter_model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(adapter_file.read_bytes())
    names = _modules(folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": LORA_ALPHA,
        "target_modules": sorted(names),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        return PeftModel.from_pretrained(load(directory), folder, is_trainable=True).eval()


def _modules(file: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return {name.split(".")[-3] for name in opened.keys()}  # noqa: SIM118


def logprobs(model: Any, rows: list[Row]) -> list[Tensor]:
    """[n] or [n, K] per row: right-padded batch, full logits, log_softmax, gather."""
    longest = max(row.length for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : row.length] = torch.from_numpy(tokens_of(row).astype(np.int64))
        mask[index, : row.length] = 1
    full = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.log_softmax(-1)
    found = []
    for index, row in enumerate(rows):
        targets = torch.from_numpy(row.inputs["target_tokens"].numpy().astype(np.int64))
        wide = targets if targets.ndim == 2 else targets[:, None]
        found.append(full[index, : row.length].gather(1, wide).view(targets.shape))
    return found


def loss(name: str, rows: list[Row], lps: list[Tensor], config: dict[str, float]) -> Tensor:
    """The summed loss of PROTOCOL.md section 7, row by row."""
    return torch.stack([_row_loss(name, row, lp, config) for row, lp in zip(rows, lps, strict=True)]).sum()


def _row_loss(name: str, row: Row, lp: Tensor, config: dict[str, float]) -> Tensor:
    given = {key: torch.from_numpy(array.numpy().astype(np.float32)) for key, array in row.inputs.items()}
    if name == "cross_entropy":
        return -(given.get("weights", torch.ones_like(lp)) * lp).sum()
    q, a = given["logprobs"], given["advantages"]
    low = given.get("clip_low_threshold", torch.full_like(q, config.get("clip_low_threshold", 0.0)))
    high = given.get("clip_high_threshold", torch.full_like(q, config.get("clip_high_threshold", 0.0)))
    ratio = torch.exp(lp - q)
    if name == "importance_sampling":
        return -(ratio * a).sum()
    if name == "ppo":
        return -torch.min(ratio * a, torch.max(torch.min(ratio, high), low) * a).sum()
    if name == "cispo":
        return -(torch.max(torch.min(ratio, high), low).detach() * lp * a).sum()
    if name == "dro":
        return -(lp * a - 0.5 * config["beta"] * (lp - q) ** 2).sum()
    if name == "gspo":
        inside = given["sequence_ratio_mask"] != 0
        s = torch.exp((lp.detach() - q)[inside].mean()) if inside.any() else torch.tensor(1.0)
        s_t = s * torch.exp(lp - lp.detach())
        return -torch.min(s_t * a, torch.max(torch.min(s_t, high), low) * a).sum()
    assert name == "stable_reinforce"
    return (-ratio.detach().clamp(max=4.0) * lp * a + config["kl_coeff"] * 0.5 * (lp - q) ** 2).sum()


def gradients(model: Any) -> dict[str, Tensor]:
    """.grad of PEFT's trainable parameters under the file's names."""
    return {
        name.replace(".default.", "."): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is not None
    }
