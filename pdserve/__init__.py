"""pdserve: disaggregated prefill/decode serving for large language models.

    from pdserve import LLM, SamplingParams

Importing pdserve imports nothing else until a name is used. docs/write-a-connector.md and
docs/clients.md list what plugins and clients may import from the packages below.
"""

TYPE_CHECKING = False  # type checkers treat this name like typing's, without the import
if TYPE_CHECKING:
    from pdserve.offline.llm import LLM
    from pdserve.offline.lora import LoRARequest
    from pdserve.offline.outputs import CompletionOutput, RequestOutput
    from pdserve.offline.params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

_HOMES = {
    "LLM": "llm",
    "CompletionOutput": "outputs",
    "LoRARequest": "lora",
    "RequestOutput": "outputs",
    "SamplingParams": "params",
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'pdserve' has no attribute {name!r}")
    return getattr(import_module(f"pdserve.offline.{_HOMES[name]}"), name)
