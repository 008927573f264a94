"""Writes the embedded model as GGUF in 16 or 32 bits for llama.cpp, with the same weights as the
folder that pdserve makes of it.

    python benchmarks/compared/gguf_model.py OUT.gguf [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
from gguf.constants import GGMLQuantizationType as Kind

from pdserve.demo_model.embedded import find_gguf

KINDS = {"bfloat16": Kind.BF16, "float16": Kind.F16, "float32": Kind.F32}
WRITTEN_BY_ITSELF = ("GGUF.", "general.architecture", "general.file_type")


def convert(source: Path, out: Path, kind: Kind) -> None:
    """Converts matrices to `kind` and vectors to float32, like llama.cpp's converter."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, item in reader.fields.items():
        if not name.startswith(WRITTEN_BY_ITSELF):
            inner = item.types[-1] if len(item.types) > 1 else None
            writer.add_key_value(name, item.contents(), item.types[0], inner)
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        target = kind if numbers.ndim > 1 else Kind.F32
        writer.add_tensor(tensor.name, gguf.quantize(numbers, target), raw_dtype=target)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=tuple(KINDS), default="bfloat16")
    options = parser.parse_args()
    convert(find_gguf(), options.out, KINDS[options.dtype])


if __name__ == "__main__":
    main()
