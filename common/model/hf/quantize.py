"""Quantizes a recorded transformers class to int8, after its graph has been compared with it.

It quantizes linear layers within decoder layers, experts (`experts.py`), the head, and an embedding
tied to it. The values are the same however the model is split.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from pdserve.common.core.errors import ConfigError
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.hf.fusions import Products
from pdserve.common.model.kernels.ops import Kernels
from pdserve.common.model.weights import Int8Matrix, WeightMatrix


def tables_of(model: Any) -> dict[str, nn.Parameter]:
    """Returns the head, and an embedding that is tied to it, by the names of their parameters."""
    modules = [model.get_output_embeddings()]
    if model.config.get_text_config().tie_word_embeddings:
        modules.append(model.get_input_embeddings())
    kept = {id(getattr(each, "weight", None)) for each in modules}
    return {name: each for name, each in model.named_parameters() if id(each) in kept}


def round_products(
    products: Products,
    names: Collection[str],
    parts: Collection[str],
    ranks: GroupCoordinator,
    kernels: Kernels,
) -> int:
    """Quantizes the products whose parameters are all in `names`; returns the bytes that this
    saves. Ranks share the inputs of those in `parts`, so all ranks call this together."""
    saved = 0
    for of, product in products.items():
        if not all(name in names for name in of):
            continue
        matrix = product.matrix
        assert isinstance(matrix, WeightMatrix), "a product is quantized once"
        group = ranks if any(name in parts for name in of) else GroupCoordinator()
        product.matrix = _int8(matrix, group, kernels)
        saved += matrix.nbytes - product.matrix.nbytes
    return saved


def _int8(matrix: WeightMatrix, ranks: GroupCoordinator, kernels: Kernels) -> Int8Matrix:
    dense = matrix.dense()
    largest = ranks.all_gather(dense.abs().amax(dim=1, keepdim=True), dim=1).amax(dim=1)
    return Int8Matrix.rounded_of(dense, largest, kernels)


def needs_graph(architecture: str, why: str) -> ConfigError:
    """Returns the error for a class that runs by its own code."""
    return ConfigError(
        f"--quantization int8: {architecture} runs by its class's own code ({why}), which needs "
        "unquantized weights: leave the option out"
    )
