"""The README.md of a tenant's export: what each file and each field is. A test compares it with what is written."""

from __future__ import annotations

_TIME = "seconds since 1970-01-01 UTC"
_RUN_ID = "id of the run; the middle of its checkpoints' tinker:// paths"
_BASE = "name of the base model; of a module: module: and the digest of its forward graph"
_LORA = "rank, seed of the first A matrices, which layers; null: all parameters of the base are trained"
_DIGEST = "SHA-256 of the safetensors file"
_METADATA = "given by the client; keys that begin with gradserve. are the server's: digests of the base model for one"
_SESSION = "id of the client's session"

FIELDS: dict[str, tuple[str, dict[str, str]]] = {
    "sessions.jsonl": (
        "One line per connection of a client.",
        {
            "id": _SESSION,
            "tenant": "who owns it",
            "created_at": _TIME,
            "last_seen_at": f"last sign of life, {_TIME}",
            "display_name": "given by the client",
            "project_id": "given by the client",
            "tags": "given by the client",
            "user_metadata": _METADATA,
            "finished": "how the client said it ended: success, errored, interrupted; null: it did not say",
            "finish_detail": "its words for that",
        },
    ),
    "runs.jsonl": (
        "One line per training run, as it stands now.",
        {
            "id": _RUN_ID,
            "tenant": "who owns it",
            "session_id": _SESSION,
            "base": _BASE,
            "lora": _LORA,
            "created_at": _TIME,
            "last_request_at": _TIME,
            "user_metadata": _METADATA,
            "version": "counts optimizer steps and loads",
            "weights": f"{_DIGEST} of the current weights",
            "moments": f"{_DIGEST} of AdamW's moments; null before the first step",
            "gradients": "[seq, digest] of gradients that wait for the next optimizer step",
            "cursor": "highest seq such that it and all lower ones have ended",
            "corrupted": "whether the run can only go on from a checkpoint",
            "parent": "the checkpoint that it began with; null: the base",
            "client_state": "SHA-256 of what the client keeps with it (gradserve.set_client_state)",
        },
    ),
    "sampling_sessions.jsonl": (
        "One line per sampling client: a base model with frozen weights.",
        {
            "id": "id of the sampling session",
            "tenant": "who owns it",
            "session_id": _SESSION,
            "base": _BASE,
            "created_at": _TIME,
            "weights": f"{_DIGEST}; null: the base alone",
            "run_id": "the run whose weights these are",
            "run_version": "their version in that run",
            "model_path": "the checkpoint that it was opened on",
            "clones": "how many processes joined it",
        },
    ),
    "checkpoints.jsonl": (
        "One line per saved checkpoint. Its files are in checkpoints/<run>/<kind>/<name>/.",
        {
            "run_id": _RUN_ID,
            "tenant": "who owns it",
            "kind": "weights (training), sampler_weights or external_weights",
            "name": "its name: tinker://<run_id>/<kind>/<name>",
            "base": _BASE,
            "lora": _LORA,
            "version": "the run's version that was saved",
            "weights": _DIGEST,
            "moments": f"{_DIGEST} of AdamW's moments; null when none were saved",
            "size_bytes": "of both files",
            "created_at": _TIME,
            "expires_at": f"{_TIME}; null: never",
            "public": "whether other tenants may read it",
            "user_metadata": _METADATA,
            "client_state": "SHA-256 of what the client kept with the run when it saved",
        },
    ),
    "ops.jsonl": (
        "One line per request that was accepted or refused, in the order of acceptance.",
        {
            "id": "id of the request's future",
            "tenant": "who sent it",
            "session_id": _SESSION,
            "scope": "the run, or for a sample the sampling session",
            "seq": "number of the request in its scope",
            "kind": "create_model, forward_backward, optim_step, save_weights, save_for_sampling, load_weights, sample",
            "accepted_at": _TIME,
            "run_id": "the run that is billed",
            "price_version": "the price sheet that held",
            "state": "accepted (not ended), done, failed, rejected, expired (its result is kept no longer)",
            "ended_at": _TIME,
            "content_type": "of the result",
            "problem": "why it failed or was rejected (RFC 9457)",
            "weights": f"{_DIGEST} of the weights that the result was computed with",
            "version": "their version",
            "metrics": "of training steps whose results are kept: loss, gradient norm; keys carry their reduction",
            "body": "(with --bodies) what was asked; arrays are lists of numbers; null when it is kept no longer; "
            "base64 of msgpack when another version of gradserve wrote it",
            "result": "(with --bodies) what was answered: JSON, or base64 of a message of gradserve_wire.proto "
            "(ForwardBackwardOutput for forward_backward, SampleResponse for sample)",
        },
    ),
    "ledger.jsonl": (
        "One line per executed request: what it cost. Append-only; the sum is the bill. ledger.csv holds the same.",
        {
            "id": "id of the line",
            "op_id": "the request",
            "tenant": "who pays",
            "kind": "kind of the request",
            "base": _BASE,
            "run_id": "the run that is billed; null for samples of a base model",
            "session_id": _SESSION,
            "seq": "number of the request in its scope",
            "train_tokens": "tokens of forward and backward passes",
            "prefill_tokens": "tokens of forward passes and prompts",
            "cached_tokens": "prompt tokens that were already computed",
            "sample_tokens": "sampled tokens",
            "compute_ms": "worker time in milliseconds, exact decimal",
            "amount_usd": "US dollars, exact decimal",
            "price_version": "the price sheet that held when the request was accepted",
            "at": _TIME,
            "env_steps": "steps of environments",
        },
    ),
    "metrics.jsonl": (
        "One line per training request that measured something; kept when results have expired.",
        {
            "run_id": _RUN_ID,
            "tenant": "who owns it",
            "seq": "number of the request in its run",
            "version": "optimizer steps of the run after it",
            "kind": "forward_backward or optim_step",
            "at": _TIME,
            "values": "loss, gradient norm and so on, by name; keys carry their reduction",
        },
    ),
    "events.jsonl": (
        "One line per thing that happened to a run: lost workers, recoveries, loads, rollbacks, expiry.",
        {
            "at": _TIME,
            "kind": "what it was",
            "detail": "in words",
            "tenant": "who owns the run",
            "run_id": _RUN_ID,
            "seq": "number of the request that it happened to, if any",
        },
    ),
    "versions.jsonl": (
        "One line per state of a run that the server made durable by itself.",
        {
            "run_id": _RUN_ID,
            "tenant": "who owns it",
            "version": "optimizer steps",
            "seq": "number of the last request that it contains",
            "weights": _DIGEST,
            "moments": f"{_DIGEST} of AdamW's moments",
            "cause": "why it was made: steps, age, replay, save, load, rollback",
            "size_bytes": "of both files",
            "created_at": _TIME,
            "manifest": "JSON: everything that a resume needs, each thing with its digest",
        },
    ),
    "graphs.jsonl": (
        "One line per loss or module that was sent as a graph; graphs/<digest>.json is its text.",
        {
            "tenant": "who owns it",
            "digest": "SHA-256 of the text",
            "name": "the function's or the module's",
            "size_bytes": "of the text",
            "created_at": _TIME,
        },
    ),
}

_FILES = """\
## checkpoints/<run>/<kind>/<name>/

Colons in run ids are written as underscores.

- `adapter_model.safetensors`, `adapter_config.json`: a LoRA adapter as `peft.PeftModel.from_pretrained` reads it; or
- `model.safetensors`, `config.json`, tokenizer files: a whole model as `transformers` reads it.
- `model.safetensors`, `forward.graph.json`: a module's parameters and buffers, and its forward pass.
- `optimizer.safetensors`: AdamW's moments, of training checkpoints that have made a step.
- `*.age`: the same files encrypted with age (age-encryption.org), of external weights that were saved with recipients.

## manifest.json

`files` has the SHA-256 and the size in bytes of every other file here, `lines` how many lines each table has, `total`
the sum of the ledger, `missing` the checkpoint files that could not be exported, and why. It was written last: an
export that has it is complete.
"""


def readme(tenant: str) -> str:
    """The text for an export of ``tenant``."""
    parts = [
        f"# Everything that gradserve kept of tenant {tenant}",
        "Every .jsonl file has one JSON object a line (UTF-8). Money and time worked are decimals written as "
        "strings, so that no digit is lost.",
    ]
    for file, (about, fields) in FIELDS.items():
        parts.append(f"## {file}\n\n{about}\n\n" + "\n".join(f"- `{name}`: {text}" for name, text in fields.items()))
    return "\n\n".join([*parts, _FILES])
