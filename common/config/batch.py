"""Options of `pdserve run-batch`."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.common.config.cluster import ClusterConfig, private_cluster
from pdserve.common.config.shared import option
from pdserve.common.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Batch

    Which requests, and who answers them: a server that runs, or a cluster that ends with the run.
    """

    input_file: str | None = option(
        None, "requests, a line each, in OpenAI's batch format", short="-i", metavar="FILE"
    )
    output_file: str | None = option(
        None,
        "answers, a line each, in the order in which they come; where it has some already, only "
        "what is missing is asked for",
        short="-o",
        metavar="FILE",
    )
    url: str | None = option(
        None,
        "a server that runs; its key is OPENAI_API_KEY (default: start a cluster, of the options "
        "below)",
    )
    max_concurrency: int | None = option(
        None, "requests in flight (default: what fills the cluster; with --url 64)", minimum=1
    )
    timeout: float = option(3600.0, "seconds for one answer", minimum=0.001)
    json: bool = option(False, "print what became of the run as JSON")
    cluster: ClusterConfig = field(default_factory=private_cluster)

    def check(self) -> None:
        """Raises ConfigError unless it says what to run where."""
        if not self.input_file or not self.output_file:
            raise ConfigError("-i and -o are needed: the requests, and where the answers go")
        if self.url and self.cluster != private_cluster():
            raise ConfigError("--url names a server that runs: options of a cluster do not fit it")
