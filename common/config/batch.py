"""Options of `pdserve run-batch`."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.common.config.cluster import ClusterConfig, private_cluster
from pdserve.common.config.options import options
from pdserve.common.config.shared import option
from pdserve.common.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Batch

    The input and output files, and the server: a running one, or a cluster started for this run.
    """

    input_file: str | None = option(
        None, "file of requests in OpenAI's batch format (JSONL)", short="-i", metavar="FILE"
    )
    output_file: str | None = option(
        None,
        "file for the answers (JSONL), in order of completion; if it has answers already, only the "
        "missing requests are sent",
        short="-o",
        metavar="FILE",
    )
    url: str | None = option(
        None,
        "a running server; its key is OPENAI_API_KEY (default: start a cluster with the options "
        "below)",
    )
    max_concurrency: int | None = option(
        None, "requests in flight (default: as many as fill the cluster; with --url 64)", minimum=1
    )
    timeout: float = option(3600.0, "seconds for one answer", minimum=0.001)
    json: bool = option(False, "print the run's summary as JSON")
    cluster: ClusterConfig = field(default_factory=private_cluster)

    def check(self) -> None:
        """Raises ConfigError for missing files, or cluster options together with --url."""
        if not self.input_file or not self.output_file:
            raise ConfigError("-i (requests) and -o (answers) are required")
        if self.url and (given := self._cluster_options()):
            raise ConfigError(
                f"--url uses a running server, which takes no cluster options: leave out {given[0]}"
            )

    def _cluster_options(self) -> list[str]:
        """Returns the flags of the cluster that are given. Keys are not: they may be variables for
        other commands."""
        default = {each.name: each.default for each in options(private_cluster())}
        return [
            each.flag
            for each in options(self.cluster)
            if each.default != default[each.name] and not each.metadata.get("secret")
        ]
