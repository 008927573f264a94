"""What `google.rpc.Status` says of an error, for clients that read it rather than our metadata."""

from __future__ import annotations

import re
from collections.abc import Sequence

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RequestInfo, RetryInfo

from pdserve.common.core.errors import PdserveError, RequestError
from pdserve.common.core.printable import cut_bytes
from pdserve.common.obs.logging import request_id_var
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.rpc.status import MAX_MESSAGE

DOMAIN = "pdserve"
RETRY_DELAY = 1.0  # seconds, where the error names none


def details(error: PdserveError, request: Message | None = None) -> Sequence[Message]:
    """`request`: what was asked, whose fields may be wrong."""
    about = {"blame": str(error.blame), "retryable": str(error.retryable).lower()}
    found: list[Message] = [ErrorInfo(reason=error.code, domain=DOMAIN, metadata=about)]
    if isinstance(error, RequestError) and error.param is not None and request is not None:
        wrong = BadRequest.FieldViolation(
            field=_path(error.param, request),
            description=cut_bytes(error.message, MAX_MESSAGE),
        )
        found.append(BadRequest(field_violations=[wrong]))
    if error.retryable:
        delay = Duration()
        delay.FromNanoseconds(int(1e9 * (error.retry_after or RETRY_DELAY)))
        found.append(RetryInfo(retry_delay=delay))
    if (request_id := request_id_var.get()) != "-":
        found.append(RequestInfo(request_id=request_id))
    return found


def _path(param: str, request: Message) -> str:
    """From the request to the field that `param` names as HTTP does, where it may be one of its
    parts'."""
    first = re.split(r"[.\[]", param, maxsplit=1)[0]
    if first not in request.DESCRIPTOR.fields_by_name:
        if first == "tokens" and isinstance(request, pb.DetokenizeRequest):
            return param.replace(first, "token_ids", 1)
        if first in pb.SamplingParams.DESCRIPTOR.fields_by_name:
            return f"sampling.{param}"
        if first in pb.Chat.DESCRIPTOR.fields_by_name or first == "tool_choice":
            return f"chat.{param}".replace(".function.", ".")
        if first == "prompt" and isinstance(request, pb.GenerateRequest | pb.TokenizeRequest):
            return request.WhichOneof("prompt") or param
    return param
