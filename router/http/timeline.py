"""How a request was served, for clients that ask for its timeline."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from pdserve.router.requests.generation import GenerationStats
from pdserve.router.requests.stages import arrival_var

PATH_HEADER = "X-PDServe-Path"


def timeline_of(stats: Iterable[GenerationStats]) -> dict[str, Any]:
    """Returns the key `pdserve`, for clients that ask for it: the timeline of the prompt that was
    answered last."""
    if (last := _timed(stats)) is None:
        return {}
    return {"pdserve": {"timeline": asdict(last.receipt())}}


def path_header(stats: Iterable[GenerationStats]) -> dict[str, str]:
    """Returns the header that says where the same prompt was computed and how its KV moved."""
    if (last := _timed(stats)) is None:
        return {}
    line = last.timeline
    moved = f"{'+'.join(line.kv_connectors)}:{line.transfer_bytes}" if line.kv_connectors else ""
    return {
        PATH_HEADER: f"prefill={line.prefill_node};decode={line.decode_node};path={line.path};"
        f"kv={moved or 'none'};recomputed={line.recomputed_tokens}"
    }


def _timed(stats: Iterable[GenerationStats]) -> GenerationStats | None:
    """Returns the prompt that was answered last, if the client requested its timeline."""
    arrival = arrival_var.get()
    if arrival is None or not arrival.wants_timeline:
        return None
    return max(stats, key=lambda stats: stats.timeline.finished or 0.0)
