"""Bodies of other APIs than chat, which are converted to chat's: the base of both."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, FailFast, create_model
from typing_extensions import TypeAliasType

from pdserve.router.api.ignored import Ignored
from pdserve.router.api.schema import FIELDS, Body, ChatBody, CompletionBody

Objects = TypeAliasType("Objects", Annotated[list[dict[str, Any]], FailFast()])
Fields = dict[str, Any]


# Chat's parameters that these bodies take, too, as vLLM's do. None of them adds a field to an
# answer.
SAME = (
    "min_tokens", "top_k", "min_p", "seed", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "allowed_token_ids", "bad_words", "truncate_prompt_tokens", "skip_special_tokens",
    "structured_outputs", "cache_salt", "priority", "timeline",
)  # fmt: skip
_SameBody: Any = create_model("_SameBody", __base__=Body, **{name: FIELDS[name] for name in SAME})


class CompatBody(_SameBody):
    """A body of another API that is translated to a chat."""

    sent_as: ClassVar[Mapping[str, str]] = {}  # the path of a field in this body, by chat's name
    chat_template_kwargs: Fields | None = None

    @classmethod
    @cache
    def elsewhere(cls) -> frozenset[str]:
        """Fields that only completions or chat have."""
        return (
            frozenset(ChatBody.model_fields | CompletionBody.model_fields) - cls.model_fields.keys()
        )

    def same(self) -> Fields:
        """Returns the fields that chat has under the same name."""
        names = (*SAME, "model", "temperature", "top_p", "stream", "chat_template_kwargs")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def parameters(self, ignored: Ignored) -> Fields:
        """Chat's other fields, without the messages. Their types have not been checked. `ignored`
        gets what chat has no equivalent of."""
        raise NotImplementedError

    def echoed(self) -> tuple[str, ...]:
        """Returns JSON of the fields that an answer repeats, however long they are."""
        return ()

    def conversation(self, ignored: Ignored) -> list[Fields]:
        """Chat's messages. Their types have not been checked. `ignored` gets parts that chat has no
        equivalent of.

        Raises:
            InvalidRequest: such a part cannot be left out.
        """
        raise NotImplementedError


class Options(BaseModel):
    """An object with fields of its own; others are in `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow")
