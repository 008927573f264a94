"""FlashInfer's signatures, read from its wheels without installing them:

    pip download --no-deps -d WHEELS flashinfer-python==VERSION     once for each version
    python tests/helpers/flashinfer_signatures.py WHEELS/*.whl

writes `flashinfer_signatures.json` beside this file: version → class → method → the parameters of
each overload, as [name, kind, whether it has a default].
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

TABLE = Path(__file__).with_suffix(".json")
FILES = {
    "BatchPrefillWithPagedKVCacheWrapper": "flashinfer/prefill.py",
    "BatchDecodeWithPagedKVCacheWrapper": "flashinfer/decode.py",
}
METHODS = ("__init__", "plan", "run")
_KINDS = {kind.name: kind for kind in inspect._ParameterKind}

Rows = list[tuple[str, str, bool]]


def main(wheels: Sequence[str]) -> None:
    table = {}
    for wheel in map(Path, wheels):
        with zipfile.ZipFile(wheel) as archive:
            found = {
                name: methods(archive.read(file).decode(), name) for name, file in FILES.items()
            }
        table[wheel.name.split("-")[1]] = {"source": wheel.name, "classes": found}
    lines = [f"{json.dumps(version)}: {json.dumps(table[version])}" for version in sorted(table)]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def methods(text: str, class_name: str) -> dict[str, list[Rows]]:
    """Returns each method's overloads. If `plan` passes its options on, they are those of
    `_plan_impl`, without its positional parameters."""
    (found,) = (
        each
        for each in ast.parse(text).body
        if isinstance(each, ast.ClassDef) and each.name == class_name
    )
    functions = [each for each in found.body if isinstance(each, ast.FunctionDef)]
    passed_on = any(each.name == "_plan_impl" for each in functions)
    names = {"plan": "_plan_impl"} if passed_on else {}
    return {
        method: [rows(each.args) for each in functions if each.name == names.get(method, method)]
        for method in METHODS
    }


def rows(args: ast.arguments) -> Rows:
    plain = [*args.posonlyargs, *args.args]
    required = len(plain) - len(args.defaults)
    found = [(arg.arg, "POSITIONAL_OR_KEYWORD", i >= required) for i, arg in enumerate(plain)]
    if args.vararg:
        found.append((args.vararg.arg, "VAR_POSITIONAL", False))
    pairs = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    found += [(arg.arg, "KEYWORD_ONLY", default is not None) for arg, default in pairs]
    if args.kwarg:
        found.append((args.kwarg.arg, "VAR_KEYWORD", False))
    return found


def signature(found: Rows) -> inspect.Signature:
    empty = inspect.Parameter.empty
    parameters = [
        inspect.Parameter(name, _KINDS[kind], default=None if default else empty)
        for name, kind, default in found
    ]
    return inspect.Signature(parameters)


if __name__ == "__main__":
    main(sys.argv[1:])
