"""The only meeting place of gateway and orchestration: ops in, results out; versions, checkpoints, ledger."""
