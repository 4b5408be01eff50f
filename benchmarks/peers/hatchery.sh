#!/bin/sh
# sh hatchery.sh VENV MODEL_DIRECTORY PORT
HERE=$(cd "$(dirname "$0")" && pwd)
export HATCHERY_DEV_PORT="$3" HATCHERY_DEV_API_KEY="${TINKER_API_KEY:-tml-benchmark-key-0000}"
export HATCHERY_DEV_DEVICE=cpu:0 HATCHERY_DEV_BASE_MODEL="$2" HF_HUB_OFFLINE=1
exec "$1/bin/python" "$HERE/hatchery_server.py"
