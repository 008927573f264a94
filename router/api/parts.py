"""Parts of a message's content, in the words of all APIs: text, and media that is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from pdserve.common.core.errors import InvalidRequest

TABLE = "docs/clients.md#supported-and-not"  # lists what this server does not do
TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The key that has the text, by the part's type. A refusal is what the assistant said."""
_MEDIA = {
    "images are": ("image", "image_url", "input_image", "computer_screenshot", "image_embeds"),
    "audio is": ("input_audio", "audio", "audio_url", "audio_embeds"),
    "videos are": ("video", "video_url", "input_video"),
    "files are": ("file", "input_file", "document", "container_upload"),
}
_WHAT = {kind: what for what, kinds in _MEDIA.items() for kind in kinds}


class Part(BaseModel):
    """A part of chat's content. `text_of` checks it."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: str
    text: str | None = None
    refusal: str | None = None


def text_of(part: Part | Mapping[str, Any] | Any, param: str) -> str:
    """Returns the text of one part.

    Raises:
        InvalidRequest: it has none; the message names images, audio and the like.
    """
    given = vars(part) if isinstance(part, Part) else part
    kind = given.get("type") if isinstance(given, Mapping) else None
    kind = kind if isinstance(kind, str) else ""
    if what := _WHAT.get(kind):
        raise InvalidRequest(
            f"{what} not supported: {param} may only have text (see {TABLE})",
            param=param,
        )
    if kind not in TEXTS:
        raise InvalidRequest(f"{param} may only have parts of type text", param=param)
    if not isinstance(text := given.get(TEXTS[kind]), str):
        raise InvalidRequest(f"{param} has a part without text", param=param)
    return text


def as_parts(content: Any, param: str, drop_empty: bool = False) -> Any:
    """Returns a list of parts as parts of type text; any other value stays as it is. Raises as
    `text_of`."""
    if not isinstance(content, list):
        return content
    texts = [text_of(part, param) for part in content]
    return [{"type": "text", "text": text} for text in texts if text or not drop_empty]
