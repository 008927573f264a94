"""Options of CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.common.config.shared import counts, option

MAX_GRAPH_SIZE = 512  # sequences; larger steps hide the cost of kernel launches by themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilationConfig:
    """CUDA graphs"""

    enforce_eager: bool = option(False, "do not use CUDA graphs for decode steps on a GPU")
    cuda_graph_sizes: str | None = option(
        None,
        "batch sizes of decode steps to capture as CUDA graphs at start; other steps are padded to "
        "the next size, larger ones run eagerly (default: 1, 2, 4 and multiples of 8 up to "
        "--max-num-seqs, at most 512)",
        metavar="N,N,...",
    )

    def graph_sizes(self, max_num_seqs: int) -> tuple[int, ...]:
        """Returns the batch sizes to capture, ascending; none with --enforce-eager.

        Raises:
            ConfigError: `cuda_graph_sizes` is not a list of counts up to `max_num_seqs`.
        """
        if self.cuda_graph_sizes is None:
            largest = min(max_num_seqs, MAX_GRAPH_SIZE)
            sizes = {size for size in (1, 2, 4, *range(8, largest, 8)) if size < largest}
            found = tuple(sorted({*sizes, largest}))
        else:
            given, limit = self.cuda_graph_sizes, "--max-num-seqs"
            found = tuple(counts("--cuda-graph-sizes", given, 1, max_num_seqs, limit))
        return () if self.enforce_eager else found
