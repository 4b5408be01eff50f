#!/bin/sh
# sh skyrl.sh VENV MODEL_DIRECTORY PORT DATA_DIRECTORY
export PATH="$1/uv-stand-in:$PATH" JAX_PLATFORMS=cpu HF_HUB_OFFLINE=1
exec uv run -m skyrl.tinker.api --host 127.0.0.1 --port "$3" --base-model "$2" --backend jax \
    --backend-config '{"max_lora_adapters": 8, "max_lora_rank": 8}' \
    --checkpoints-base "$4/checkpoints" --database-url "sqlite:///$4/tinker.db"
