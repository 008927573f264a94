"""Splits a model's layers into pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from pdserve.common.config.engine import ParallelConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers `start … end-1`. The first stage also has the embedding, the last one the final norm
    and the head."""

    start: int
    end: int
    first: bool = True
    last: bool = True

    @property
    def num_layers(self) -> int:
        return self.end - self.start

    def over(self, places: int) -> Stage:
        """Returns the stage if each layer counts as `places` layers."""
        return Stage(self.start // places, self.end // places, self.first, self.last)

    @classmethod
    def whole(cls, num_layers: int) -> Stage:
        """Returns the only stage of a model that is not split."""
        return cls(0, num_layers)


def pipeline_stages(
    num_layers: int, size: int, partition: Sequence[int] | None = None
) -> tuple[Stage, ...]:
    """Splits `num_layers` into `size` stages by `partition`, or evenly, with the remainder in the
    first stages.

    Raises:
        ConfigError: a stage would be empty, or `partition` does not match `size` or `num_layers`.
    """
    if size > num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {size} exceeds the model's {num_layers} layers"
        )
    least, rest = divmod(num_layers, size)
    counts = partition or [least + (stage < rest) for stage in range(size)]
    if len(counts) != size or sum(counts) != num_layers or min(counts) < 1:
        raise ConfigError(
            f"--pipeline-partition {','.join(map(str, counts))} does not split {num_layers} layers "
            f"into {size} stages"
        )
    edges = list(accumulate(counts, initial=0))
    return tuple(Stage(a, b, a == 0, b == num_layers) for a, b in pairwise(edges))


def parse_partition(text: str | None) -> tuple[int, ...] | None:
    """Parses --pipeline-partition: "9,8,8,5" are the layers of four stages. Raises ConfigError."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--pipeline-partition {text!r} is not a list such as 9,8,8,5") from error


def stages_of(spec: ModelSpec, parallel: ParallelConfig) -> tuple[Stage, ...]:
    """Returns the stages of the options; raises ConfigError if they do not fit the layers."""
    partition = parse_partition(parallel.pipeline_partition)
    return pipeline_stages(spec.num_layers, parallel.pipeline_parallel_size, partition)
