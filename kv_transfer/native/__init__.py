"""Code in C++ that copies, hashes and moves KV blocks in host memory."""

from pathlib import Path

from pdserve.common.core.native_library import Library

BLOCKS = Library("kv-blocks", Path(__file__).parent)
