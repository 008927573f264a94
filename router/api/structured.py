"""Reads the constraint on an answer's text from any of the fields that clients have for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pdserve.common.core import exact_json
from pdserve.common.core.errors import InvalidRequest
from pdserve.common.core.structured import ConstraintKind, StructuredOutput
from pdserve.router.api.schema import GenerationBody

_ANY_OBJECT = {"type": "object"}
_BACKENDS = ("auto", "guidance")
_OPTIONS = {
    "disable_any_whitespace", "whitespace_pattern", "disable_fallback",
    "disable_additional_properties",
}  # fmt: skip


def structured_of(body: GenerationBody) -> StructuredOutput | None:
    """Returns the constraint in a body; None: any text is allowed.

    Raises:
        InvalidRequest: a constraint is wrong, or there are several; `param` names the field.
    """
    if body.guided_decoding_backend not in (None, *_BACKENDS):
        raise _wrong("guided_decoding_backend", f"must be one of {', '.join(_BACKENDS)}")
    if body.guided_whitespace_pattern is not None and body.guided_json is None:
        raise _wrong("guided_whitespace_pattern", "needs guided_json")
    found = [
        each
        for each in (
            _of_response_format(body.response_format),
            from_structured_outputs(body.structured_outputs),
            *(_of_guided(body, kind) for kind in ConstraintKind),
        )
        if each is not None
    ]
    if len(found) > 1:
        raise _wrong(found[1].param, f"and {found[0].param} exclude each other")
    return found[0] if found else None


def _of_response_format(given: Mapping[str, Any] | None) -> StructuredOutput | None:
    if given is None:
        return None
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            return StructuredOutput.of_json(ConstraintKind.JSON, _ANY_OBJECT, "response_format")
        case "json_schema":
            param = "response_format.json_schema"
            wrapped = given.get("json_schema")
            if not isinstance(wrapped, dict):
                raise _wrong(param, "must be an object with a schema")
            return _make(ConstraintKind.JSON, wrapped.get("schema"), f"{param}.schema")
        case "structural_tag":
            return _make(ConstraintKind.STRUCTURAL_TAG, dict(given), "response_format")
        case _:
            raise _wrong(
                "response_format",
                "must have the type text, json_object, json_schema or structural_tag",
            )


def from_structured_outputs(given: Mapping[str, Any] | None) -> StructuredOutput | None:
    """Returns the constraint in vLLM's `StructuredOutputsParams`; a null is absent there, too.
    Raises as `structured_of`."""
    if given is None:
        return None
    name = "structured_outputs"
    present = {key: value for key, value in given.items() if value is not None}
    kinds = {each.value for each in ConstraintKind} | {"json_object"}
    if unknown := sorted(present.keys() - kinds - _OPTIONS):
        raise _wrong(f"{name}.{unknown[0][:64]}", "is not known")
    if present.get("disable_additional_properties"):
        raise _wrong(
            f"{name}.disable_additional_properties",
            "is not supported: set additionalProperties in each object",
        )
    if present.get("json_object") is False:
        del present["json_object"]
    chosen = sorted(present.keys() & kinds)
    if len(chosen) != 1:
        raise _wrong(name, f"must have exactly one of {', '.join(sorted(kinds))}")
    options = {
        "any_whitespace": not _boolean(present, "disable_any_whitespace", name),
        "whitespace_pattern": _text(present, "whitespace_pattern", name),
    }
    kind, value, param = chosen[0], present[chosen[0]], f"{name}.{chosen[0]}"
    if kind == "json_object":
        if value is not True:
            raise _wrong(param, "must be a boolean")
        return _make(ConstraintKind.JSON, _ANY_OBJECT, param, **options)
    return _make(ConstraintKind(kind), value, param, **options)


def _of_guided(body: GenerationBody, kind: ConstraintKind) -> StructuredOutput | None:
    """`guided_json` and the like, vLLM's fields until 0.11."""
    value = getattr(body, name := f"guided_{kind}", None)
    if value is None:
        return None
    return _make(kind, value, name, whitespace_pattern=body.guided_whitespace_pattern)


def _make(kind: ConstraintKind, value: Any, param: str, **options: Any) -> StructuredOutput:
    return _MAKE[kind](kind, value, param, **options)


def _of_text(kind: ConstraintKind, value: Any, param: str, **options: Any) -> StructuredOutput:
    if not isinstance(value, str) or not value:
        raise _wrong(param, "must be a text")
    return StructuredOutput(kind, value, param, **options)


def _of_choices(kind: ConstraintKind, value: Any, param: str, **options: Any) -> StructuredOutput:
    if not isinstance(value, list) or not value or not all(isinstance(x, str) for x in value):
        raise _wrong(param, "must be a list of strings, with one at least")
    return StructuredOutput.of_json(kind, value, param, **options)


def _of_object(kind: ConstraintKind, value: Any, param: str, **options: Any) -> StructuredOutput:
    """Takes an object, or the JSON text of one, which stays as it is."""
    if isinstance(value, dict):
        return StructuredOutput.of_json(kind, value, param, **options)
    made = _of_text(kind, value, param, **options)
    try:
        if isinstance(exact_json.loads(made.text), dict):
            return made
    except (ValueError, RecursionError) as error:
        raise _wrong(param, f"is not valid JSON: {error}") from error
    raise _wrong(param, "must be a JSON object")


_MAKE: dict[ConstraintKind, Callable[..., StructuredOutput]] = {
    ConstraintKind.JSON: _of_object,
    ConstraintKind.STRUCTURAL_TAG: _of_object,
    ConstraintKind.CHOICE: _of_choices,
    ConstraintKind.REGEX: _of_text,
    ConstraintKind.GRAMMAR: _of_text,
}


def _boolean(given: Mapping[str, Any], key: str, name: str) -> bool:
    if not isinstance(value := given.get(key, False), bool):
        raise _wrong(f"{name}.{key}", "must be a boolean")
    return value


def _text(given: Mapping[str, Any], key: str, name: str) -> str | None:
    if not isinstance(value := given.get(key), str | None):
        raise _wrong(f"{name}.{key}", "must be a text")
    return value


def _wrong(param: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{param} {what}", param=param)
