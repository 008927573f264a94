"""What one process proves with who it is, and knows the others by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from pdserve.common.config.shared import AuthConfig, TLSConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.host import is_loopback
from pdserve.common.rpc.auth import ClusterKey
from pdserve.common.rpc.guard import Guard
from pdserve.common.rpc.server import Channels
from pdserve.common.rpc.tls import TLS


@dataclass(frozen=True, slots=True)
class Credentials:
    """Of a role, under the id by which logs name this process."""

    role: str
    node_id: str
    tls: TLS | None = None
    key: ClusterKey | None = None

    @classmethod
    def load(
        cls, role: str, node_id: str, tls: TLSConfig, auth: AuthConfig, hosts: Iterable[str]
    ) -> Credentials:
        """`hosts` are the addresses this process will bind to.

        Raises:
            ConfigError: as `TLS.load` and `ClusterKey`; or others could reach a host, and nothing
                would tell them from this cluster's roles.
        """
        files = TLS.load(tls)
        key = None if auth.cluster_key is None else ClusterKey(auth.cluster_key)
        if key is None and files is not None and role not in files.roles():
            raise ConfigError(
                f"--tls-cert {files.cert} does not name the role {role}: make certificates with "
                "`pdserve certs`, or give all roles the same --cluster-key as well"
            )
        open_host = next((host for host in hosts if not is_loopback(host)), None)
        if key is None and files is None and open_host is not None and not auth.insecure:
            raise ConfigError(
                f"other hosts reach {open_host}, and nothing keeps strangers out: give all roles "
                "the same --cluster-key (PDSERVE_CLUSTER_KEY; `openssl rand -hex 32` makes one) or "
                "--tls-cert, --tls-key and --tls-ca; or say --insecure where no stranger is"
            )
        return cls(role, node_id, files, key)

    def guard(self) -> Guard:
        """For a server that other roles call."""
        return Guard(self.key, by_certificate=self.tls is not None)

    def channels(self) -> Channels:
        """For this process's calls of other roles."""
        if self.key is None:
            return Channels(self.tls)
        return Channels(self.tls, partial(self.key.sign, self.role, self.node_id))
