"""How runs and what they used are said to people."""

from __future__ import annotations

from gradserve.store.base import LedgerLine, LedgerTotal, Run


def base_of(run: Run) -> str:
    """The base's name; of a module the start of its forward graph's hash, which ``gradserve program`` takes in full."""
    return run.base if run.graph is None else f"module {run.graph[:12]}"


def used(bill: LedgerLine | LedgerTotal) -> str:
    """Tokens by kind and steps of environments, those that there are."""
    parts = [
        (bill.train_tokens, "trained"),
        (bill.prefill_tokens, "prefilled"),
        (bill.sample_tokens, "sampled"),
    ]
    said = [f"{count:,} {what}" for count, what in parts if count]
    tokens = [", ".join(said) + " tokens"] if said else []
    steps = [f"{bill.env_steps:,} environment steps"] if bill.env_steps else []
    return ", ".join(tokens + steps) or "no tokens"
