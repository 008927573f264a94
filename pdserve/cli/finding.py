"""What `pdserve doctor` says of each thing it looks at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"  # serves, with a disadvantage
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at and seen; of what is not in order also what helps."""

    subject: str
    verdict: Verdict
    seen: str
    mend: str = ""
