"""The world's tensor-, pipeline- and expert-parallel groups.

    environment = init_distributed_environment(rank, world_size, init_method)
    state = initialize_model_parallel(environment, tensor_parallel_size=2, pipeline_parallel_size=2)
    state.tp.all_reduce(…)

Groups are objects that are passed to their users.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from pdserve.common.core.errors import ConfigError
from pdserve.common.distributed.environment import DistributedEnvironment
from pdserve.common.distributed.group import GroupCoordinator

logger = logging.getLogger(__name__)

Layout = dict[str, list[list[int]]]


def group_layout(world: int, tp: int, pp: int = 1, ep: int = 1) -> Layout:
    """Returns the ranks of each group, with keys "world", "tp", "pp" and "ep".

    Neighbouring ranks form a TP group, because they communicate most; the stages of a pipeline are
    `tp` ranks apart. Experts are spread over the ranks of a TP group: `ep` of them hold different
    experts, and `tp / ep` neighbours split each expert by tensor parallelism.

        4 ranks, tp = 2, pp = 2:   tp [0, 1] [2, 3]   pp [0, 2] [1, 3]

    Raises:
        ConfigError: `world` is not `tp * pp`, or `ep` does not divide `tp`.
    """
    if min(tp, pp, ep) < 1 or world != tp * pp:
        raise ConfigError(f"{world} ranks are not {tp} (tensor) x {pp} (pipeline) parallel")
    if tp % ep:
        raise ConfigError(
            f"--expert-parallel-size {ep} must divide --tensor-parallel-size {tp}: experts are "
            "spread over the ranks of a tensor-parallel group"
        )
    ranks, share = list(range(world)), tp // ep
    tensor = [ranks[start : start + tp] for start in range(0, world, tp)]
    return {
        "world": [ranks],
        "tp": tensor,
        "pp": [ranks[start::tp] for start in range(tp)],
        "ep": [group[start::share] for group in tensor for start in range(share)],
    }


@dataclass(frozen=True, slots=True)
class ParallelState:
    """A rank's groups."""

    world: GroupCoordinator
    tp: GroupCoordinator
    pp: GroupCoordinator
    ep: GroupCoordinator
    layout: Layout

    def serve(self) -> None:
        """Ends the start: from now on the time-outs of service hold."""
        for group in self._groups:
            group.serve()

    def close(self) -> None:
        for group in self._groups:
            group.close()

    @property
    def _groups(self) -> tuple[GroupCoordinator, ...]:
        return self.world, self.tp, self.pp, self.ep


def initialize_model_parallel(
    environment: DistributedEnvironment,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    expert_parallel_size: int = 1,
) -> ParallelState:
    """Connects this rank's groups as in `group_layout`.

    Raises:
        ConfigError: the sizes do not fit the world.
        NodeError: RANK_LOST, a rank was lost meanwhile.
    """
    layout = group_layout(
        environment.world_size, tensor_parallel_size, pipeline_parallel_size, expert_parallel_size
    )
    groups = {name: _own(environment, name, groups) for name, groups in layout.items()}
    state = ParallelState(**groups, layout=layout)
    if environment.rank == 0 and environment.world_size > 1:
        for line in describe(state):
            logger.info(line)
    return state


def describe(state: ParallelState) -> list[str]:
    """Returns one line per kind of group: its members and this rank's transport."""
    groups = {"world": state.world, "tp": state.tp, "pp": state.pp, "ep": state.ep}
    return [
        f"{name} groups: {' '.join(map(str, state.layout[name]))}  ({group.transport})"
        for name, group in groups.items()
    ]


def _own(
    environment: DistributedEnvironment, name: str, groups: list[list[int]]
) -> GroupCoordinator:
    ranks = next(ranks for ranks in groups if environment.rank in ranks)
    return environment.group(name, ranks)
