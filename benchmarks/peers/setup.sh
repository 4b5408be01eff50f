#!/bin/sh
# Install one peer from PyPI into a virtual environment, with the SDK that it works with.
#   sh benchmarks/peers/setup.sh hatchery|tuft|skyrl DIRECTORY
# The peers' own requirements ask for CUDA builds, vLLM or Python 3.12; none of that is needed for the tiny model on a
# CPU, so each package is installed without dependencies and given what it imports.
set -eu
PEER=$1
VENV=$2/$1
[ -x "$VENV/bin/python" ] || python3 -m venv "$VENV"
pip() { "$VENV/bin/python" -m pip "$@"; }
pip install torch==2.13.0
case $PEER in
hatchery)
    pip install torch==2.13.0 tinker==0.22.2 fastapi "uvicorn[standard]" msgpack aiosqlite structlog httpx brotli \
        zstandard transformers peft psutil
    pip install --no-deps --ignore-requires-python hatchery-core==0.3.0 hatchery-client==0.2.0
    ;;
tuft)
    pip install torch==2.13.0 "tinker>=0.25,<0.26" "fastapi>=0.133,<0.137" httpx "numpy>=2" nvidia-ml-py \
        "omegaconf>=2.3" opentelemetry-api opentelemetry-sdk opentelemetry-exporter-otlp \
        "opentelemetry-instrumentation-fastapi>=0.41b0" "opentelemetry-instrumentation-logging>=0.41b0" \
        peft==0.20.0 protobuf psutil "ray>=2.50" "transformers>=5.5.3,<6" "typer>=0.20.1" "uvicorn[standard]>=0.38" \
        "accelerate>=1"
    pip install --no-deps tuft==0.2.2
    ;;
skyrl)
    pip install torch==2.13.0 "tinker>=0.25,<0.26" "transformers>=5.6.1,<=5.16.1" peft==0.18.1 "fastapi[standard]" \
        sqlmodel "sqlalchemy[asyncio]" aiosqlite asyncpg psycopg2-binary "jax>=0.8,<1" "flax>=0.12.2" optax datasets \
        cloudpathlib xxhash zstandard aiohttp psutil rich typer hf_transfer
    pip install --no-deps --ignore-requires-python skyrl==0.4.0
    # Python 3.11: pydantic wants TypedDict from typing_extensions.
    TYPES=$("$VENV/bin/python" -c 'import importlib.util as u; print(u.find_spec("skyrl").submodule_search_locations[0])')
    sed -i 's/^from typing import Annotated, Any, Literal, TypedDict$/from typing import Annotated, Any, Literal\n\nfrom typing_extensions import TypedDict/' \
        "$TYPES/tinker/types.py"
    # SkyRL starts its engine with "uv run ... -m MODULE": a stand-in that runs MODULE in this environment.
    # It must stay the parent of what it runs, since SkyRL reads its command line.
    mkdir -p "$VENV/uv-stand-in"
    cat > "$VENV/uv-stand-in/uv" <<SHIM
#!/bin/sh
while [ "\$1" != -m ]; do shift; done
"$(cd "$VENV" && pwd)/bin/python" "\$@"
SHIM
    chmod +x "$VENV/uv-stand-in/uv"
    ;;
*)
    echo "unknown peer: $PEER" >&2
    exit 2
    ;;
esac
