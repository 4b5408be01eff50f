#!/bin/sh
# sh tuft.sh VENV MODEL_DIRECTORY PORT DATA_DIRECTORY     trains only: it samples through vLLM, which needs a GPU
HERE=$(cd "$(dirname "$0")" && pwd)
cat > "$4/tuft.yaml" <<YAML
checkpoint_dir: $4/checkpoints
authorized_users:
  ${TINKER_API_KEY:-tml-benchmark-key-0000}: benchmark
supported_models:
  - model_name: $2
    model_path: $2
    max_model_len: 4096
    capabilities: [training]
    max_lora_rank: 32
    max_loras: 8
    micro_batch_size: 8
YAML
export TUFT_HOME="$4" RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1
exec "$1/bin/python" "$HERE/tuft_server.py" launch --port "$3" --config "$4/tuft.yaml"
