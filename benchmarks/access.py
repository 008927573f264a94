"""Access to the routers of a fleet and to their nodes: addresses, keys, and what they say. Another
process has it too: `packed` makes JSON of it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import grpc

MAX_REFUSAL = 300  # bytes of a router's refusal that are shown
LOAD, HOSTILE, PROBE = range(3)  # clients, by the number of their API key


class Refused(Exception):
    """A router rejects the fleet's key; waiting does not help."""


class Access:
    def __init__(
        self,
        routers: Mapping[str, Mapping[str, int]],
        router: Mapping[str, Any],
        pids: Mapping[str, int] | None = None,
        by_address: Mapping[str, str] | None = None,
    ) -> None:
        """`routers`: name → port by door. `router`: the options of every router. `pids`: of the
        processes that should run, by name. `by_address`: gRPC address → node."""
        self.routers = {name: dict(ports) for name, ports in routers.items()}
        self.ports = self.routers["router"]
        self.pids = dict(pids or {})
        self._router = dict(router)
        self._by_address = dict(by_address or {})

    def packed(self) -> dict[str, Any]:
        """Returns the arguments of an equal `Access`, as JSON allows them."""
        options = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in self._router.items()
        }
        return {
            "routers": self.routers,
            "router": options,
            "pids": self.pids,
            "by_address": self._by_address,
        }

    # ---- credentials ------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether roles need no authentication."""
        return not {"cluster_key", "tls_ca"} & self._router.keys()

    @property
    def cluster_key(self) -> str | None:
        return self._router.get("cluster_key")

    def api_key(self, number: int) -> dict[str, str]:
        """Returns the header or metadata with the API key of this number; empty if the router has
        no keys."""
        if not (keys := self._router.get("api_key")):
            return {}
        return {"authorization": f"Bearer {keys.split(',')[number]}"}

    def _operator(self) -> dict[str, str]:
        key = self._router.get("admin_api_key")
        return {"authorization": f"Bearer {key}"} if key else {}

    @property
    def registry(self) -> str:
        """The address at which nodes register."""
        return f"127.0.0.1:{self.ports['registry']}"

    def registries(self, host: str = "127.0.0.1") -> str:
        """Returns the value of a node's --router, for routers on this host."""
        return ",".join(f"{host}:{ports['registry']}" for ports in self.routers.values())

    def credentials(self, role: bool = False) -> grpc.ChannelCredentials | None:
        """Returns the credentials of a gRPC client or of a role; None without TLS. A client's files
        are in the roles' folder."""
        if "tls_ca" not in self._router:
            return None
        ca, prefix = Path(self._router["tls_ca"]), "" if role else "client-"
        files = (ca, ca.with_name(f"{prefix}key.pem"), ca.with_name(f"{prefix}cert.pem"))
        return grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))

    # ---- state ------------------------------------------------------------------------------

    def state(self, router: str = "router") -> dict[str, Any]:
        """Returns the router's `/v1/cluster`. Each node has its `name` in this fleet, empty if it
        is not one of ours. Raises OSError."""
        state = self.shown("/v1/cluster", router)
        for node in state["nodes"]:
            node["name"] = self._by_address.get(node["address"], "")
        return state

    def shown(self, path: str, router: str = "router") -> dict[str, Any]:
        """Returns the JSON at an operators' `path` of the router.

        Raises:
            OSError: the router does not answer, or lacks the path.
            Refused: the router does not accept the fleet's operator key.
        """
        url = f"http://127.0.0.1:{self.routers[router]['http']}{path}"
        try:
            with urlopen(Request(url, headers=self._operator()), timeout=10) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except HTTPError as error:
            if error.code not in (401, 403):
                raise
            raise Refused(
                f"{router} answers {error.code} to {path}: {error.read()[:MAX_REFUSAL]!r}; give "
                "the fleet's `router` options the operator's key, admin_api_key"
            ) from error
        except HTTPException as error:  # it died while it answered
            raise ConnectionError(f"{url}: {error!r}") from error


def measured(address: str) -> defaultdict[str, float]:
    """Returns the metrics of a node's engines, added up, by name. Raises OSError."""
    with urlopen(f"http://{address}/metrics", timeout=10) as answer:
        lines = [line.rpartition(" ") for line in answer.read().decode().splitlines()]
    values: defaultdict[str, float] = defaultdict(float)
    for name, _, value in lines:
        if "{engine=" in name:
            values[name.partition("{")[0].removeprefix("pdserve_")] += float(value)
    return values
