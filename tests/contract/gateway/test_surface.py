"""Paths and error codes are public: growth is a decision. After deciding, run with GRADSERVE_THAW=1 and commit."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import gradserve.gateway
import gradserve.orchestration
import gradserve.wire.codec
from tests.contract.gateway.gate import Gate

HERE = Path(__file__).parent
_CODE = re.compile(
    r"""(adapter|auth|body|checkpoint|compute|config|data|evaluate|file|full|future|graph|http|input|link|load|lora|loss|model
    |op|optim|policy|prompt|query|rollout|run|sample|sampler|save|seed|seq|server|session|storage|trajectory|unsupported
    |update|version|weights)[.](?!json$)[a-z_]+""",
    re.VERBOSE,
)


def check(name: str, lines: list[str]) -> None:
    file, text = HERE / name, "\n".join(lines) + "\n"
    if os.environ.get("GRADSERVE_THAW"):
        file.write_text(text)
    assert file.read_text() == text, f"{name} changed; if that is wanted: GRADSERVE_THAW=1 and commit"


def test_paths(gate: Gate) -> None:
    document = gate.client.get("/openapi.json").json()
    lines = [
        f"{method.upper()} {path}" for path, methods in sorted(document["paths"].items()) for method in sorted(methods)
    ]
    check("frozen_paths.txt", lines)


def test_bodies_are_described(gate: Gate) -> None:
    document = gate.client.get("/openapi.json").json()
    schema = document["paths"]["/api/v1/optim_step"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = schema["$ref"].removeprefix("#/components/schemas/")
    assert "adam_params" in document["components"]["schemas"][name]["properties"]


def test_error_codes() -> None:
    packages = (gradserve.gateway, gradserve.orchestration)
    sources = [file for package in packages for file in Path(str(package.__file__)).parent.rglob("*.py")]
    sources.append(Path(gradserve.wire.codec.__file__))
    codes = {
        node.value
        for source in sources
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _CODE.fullmatch(node.value)
    }
    check("frozen_codes.txt", sorted(codes))
