"""Which layers each stage of a pipeline holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from pdserve.common.config.node import ParallelConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers `start … end-1`. The first stage has the embedding as well, the last one the final
    norm and the head."""

    start: int
    end: int
    first: bool = True
    last: bool = True

    @property
    def num_layers(self) -> int:
        return self.end - self.start

    @classmethod
    def whole(cls, num_layers: int) -> Stage:
        """The only stage of a model that is not cut."""
        return cls(0, num_layers)


def pipeline_stages(
    num_layers: int, size: int, partition: Sequence[int] | None = None
) -> tuple[Stage, ...]:
    """`num_layers` cut into `size` stages as `partition` says, or evenly, earlier stages taking
    what does not divide.

    Raises:
        ConfigError: a stage would be empty, or the parts are not `size` or not the whole.
    """
    if size > num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {size} exceeds the model's {num_layers} layers"
        )
    least, rest = divmod(num_layers, size)
    counts = partition or [least + (stage < rest) for stage in range(size)]
    if len(counts) != size or sum(counts) != num_layers or min(counts) < 1:
        raise ConfigError(
            f"--pipeline-partition {','.join(map(str, counts))} does not cut {num_layers} layers "
            f"into {size} stages"
        )
    edges = list(accumulate(counts, initial=0))
    return tuple(Stage(a, b, a == 0, b == num_layers) for a, b in pairwise(edges))


def parse_partition(text: str | None) -> tuple[int, ...] | None:
    """`--pipeline-partition`: "9,8,8,5" are the layers of four stages. Raises ConfigError."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--pipeline-partition {text!r} is not a list such as 9,8,8,5") from error


def stages_of(spec: ModelSpec, parallel: ParallelConfig) -> tuple[Stage, ...]:
    """Raises ConfigError if the model's layers cannot be cut as the options say."""
    partition = parse_partition(parallel.pipeline_partition)
    return pipeline_stages(spec.num_layers, parallel.pipeline_parallel_size, partition)
