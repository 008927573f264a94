"""The results of the checks of `pdserve doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"  # the cluster serves, but slower or without a feature
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `fix` is empty when the verdict is OK."""

    subject: str
    verdict: Verdict
    seen: str
    fix: str = ""
