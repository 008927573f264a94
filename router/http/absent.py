"""Endpoints of other servers that this one lacks: for the errors that say so, and for the table in
docs/clients.md."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.common.core.errors import UnsupportedEndpoint
from pdserve.common.core.printable import printable
from pdserve.router.api.parts import TABLE


@dataclass(frozen=True, slots=True)
class Absent:
    """Endpoints that this server lacks."""

    what: str  # the object of "pdserve does not serve …"
    paths: tuple[str, ...]  # each with all below it; one that ends with / without itself
    instead: str = ""

    def has(self, path: str) -> bool:
        return any(path == each or path.startswith(each.rstrip("/") + "/") for each in self.paths)


ABSENT = (
    Absent("embeddings", ("/v1/embeddings", "/v1/embed", "/v2/embed")),
    Absent(
        "reranking, scores, pooling and classification",
        ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/v1/pooling", "/pooling",
         "/v1/classify", "/classify"),
    ),
    Absent("moderation", ("/v1/moderations",)),
    Absent("audio and realtime sessions", ("/v1/audio", "/v1/realtime")),
    Absent("making images and videos", ("/v1/images", "/v1/videos")),
    Absent("files and uploads", ("/v1/files", "/v1/uploads"), "send text in the messages"),
    Absent(
        "batches",
        ("/v1/batches", "/v1/messages/batches"),
        "`pdserve run-batch` answers a file of requests",
    ),
    Absent(
        "stored answers and conversations",
        ("/v1/responses/", "/v1/chat/completions/", "/v1/conversations"),
        "nothing is stored: send the whole conversation",
    ),
    Absent(
        "assistants, threads, vector stores and containers",
        ("/v1/assistants", "/v1/threads", "/v1/vector_stores", "/v1/containers", "/v1/skills"),
        "`/v1/responses` with functions",
    ),
    Absent("fine-tuning and evaluations", ("/v1/fine_tuning", "/v1/fine-tunes", "/v1/evals")),
    Absent("Anthropic's text completion", ("/v1/complete",), "`/v1/messages`"),
    Absent("Ollama's API", ("/api/",), "`/v1`"),
    Absent("SGLang's and TGI's own API", ("/generate", "/generate_stream"), "`/v1/completions`"),
)  # fmt: skip


def unsupported_endpoint(path: str) -> UnsupportedEndpoint | None:
    """Returns the error for a path that this server lacks; None: no such server has it."""
    for each in ABSENT:
        if each.has(path):
            instead = f" Instead: {each.instead}." if each.instead else ""
            return UnsupportedEndpoint(
                f"pdserve does not serve {each.what}: there is no {printable(path, 128)}."
                f"{instead} What it does, and does not: {TABLE}"
            )
    return None
