"""Runs rendered pods as processes: each has its own address, host name and file system, and runs as
its container's user, with only the container's environment. Linux, root only."""

from __future__ import annotations

import base64
import os
import re
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from benchmarks.hosts import Network
from chart import ports_of
from paths import ROOT

INIT_TIMEOUT = START_TIMEOUT = 600.0  # seconds; only a hang takes so long: pods compile kernels
PDSERVE = Path(sys.executable).with_name("pdserve")
# The host's folders, except for those that each container has itself.
ROOT_FOLDERS = r"""
set -eu
hostname "$POD_NAME"
root=$ROOT
mkdir -p "$root"
mount -t tmpfs -o mode=755 pod "$root"
for path in /* /root/.[!.]*; do
    case $path in /tmp | /home | /root | /models | /etc | /mnt | /old_root) continue ;; esac
    if [ -L "$path" ]; then cp -P "$path" "$root$path"
    elif [ -d "$path" ]; then mkdir -p "$root$path"; mount --rbind "$path" "$root$path"; fi
done
mkdir -p "$root/home/pdserve"
cp -a /etc "$root/etc"
mount --bind "$HOSTS" "$root/etc/hosts"
echo "multi on" >"$root/etc/host.conf"
"""
# The checkout and its Python, if they are below a folder that each container has itself.
CODE = "".join(
    f'at="$root"{path}; [ "$at" -ef {path} ] || {{ mkdir -p "$at"; mount --rbind {path} "$at"; }}\n'
    for path in map(shlex.quote, (str(ROOT), sys.prefix, sys.base_prefix))
)
ENTER = r"""
mount -o remount,ro "$root"
exec chroot "$root" /usr/bin/setpriv --reuid=10001 --regid=10001 --clear-groups \
    --no-new-privs --bounding-set=-all --inh-caps=-all -- """


@dataclass
class Pod:
    name: str
    component: str
    address: str
    spec: Any
    process: subprocess.Popen[bytes] | None = None
    log: Path = field(default_factory=Path)
    serves: bool = False  # whether its Service sends clients to it

    @property
    def container(self) -> Any:
        (container,) = self.spec["containers"]
        return container


class Kubelet:
    """The pods of a release. A Service's name resolves to all of its pods if it is headless, else
    to the first one."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        objects: Sequence[Any],
        secrets: Mapping[str, Mapping[str, str]],
    ) -> None:
        """`secrets`: entries of the Secrets that are not part of the release."""
        self._network = network
        self._folder = folder
        self._secrets = dict(secrets)
        for made in objects:
            if made["kind"] == "Secret":
                entries = made["data"].items()
                self._secrets[made["metadata"]["name"]] = {
                    name: base64.b64decode(value).decode() for name, value in entries
                }
        self._services = [made for made in objects if made["kind"] == "Service"]
        self.pods = [pod for made in objects for pod in self._pods_of(made)]
        self._name_pods()

    def _pods_of(self, made: Any) -> Iterator[Pod]:
        name = made["metadata"]["name"]
        if made["kind"] == "Pod":
            yield self._pod(name, _component(made), made["spec"])
        elif made["kind"] in ("Deployment", "StatefulSet"):
            for number in range(made["spec"]["replicas"]):
                template = made["spec"]["template"]
                yield self._pod(f"{name}-{number}", _component(template), template["spec"])

    def _pod(self, name: str, component: str, spec: Any) -> Pod:
        address, _ = self._network.add()
        log = self._folder / f"{name}.log"
        log.touch()
        return Pod(name, component, address, spec, log=log)

    def _name_pods(self) -> None:
        """Writes the hosts file that all pods share, in place."""
        (self._folder / "hosts").write_text(
            "\n".join(["127.0.0.1 localhost", *self._names()]) + "\n"
        )

    def _names(self) -> Iterator[str]:
        for service in self._services:
            name, spec = service["metadata"]["name"], service["spec"]
            component = spec["selector"]["app.kubernetes.io/component"]
            pods = [pod for pod in self.pods if pod.component == component]
            headless = spec.get("clusterIP") == "None"
            for pod in pods if headless else pods[:1]:
                yield f"{pod.address} {name}"
            if headless:
                yield from (f"{p.address} {p.name}.{name}.default.svc.cluster.local" for p in pods)

    # ---- one pod ----------------------------------------------------------------------------

    def start(self, pod: Pod) -> None:
        """Runs the init containers to their end, and starts the serving container."""
        for container in pod.spec.get("initContainers", ()):
            assert self._run(pod, container).wait(INIT_TIMEOUT) == 0, pod.log.read_text()
        pod.process = self._run(pod, pod.container)

    def _run(self, pod: Pod, container: Any) -> subprocess.Popen[bytes]:
        environment = {each["name"]: self._value(each, pod) for each in container.get("env", ())}
        words = [
            re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], word)
            for word in container["args"]
        ]
        variables = {"PATH": os.environ["PATH"], "HOME": "/home/pdserve", **environment}
        command = ["env", "-i", *(f"{n}={v}" for n, v in variables.items()), str(PDSERVE), *words]
        mounts = "".join(self._mounts(pod, container))
        root = self._folder / f"{pod.name}.root"
        with pod.log.open("ab") as log:
            return subprocess.Popen(
                [
                    *("nsenter", "-t", str(self._network.pid(pod.address)), "-n"),
                    *("unshare", "--mount", "--uts", "bash", "-c"),
                    ROOT_FOLDERS + mounts + CODE + ENTER + shlex.join(command),
                ],
                env={
                    **os.environ,
                    "POD_NAME": pod.name,
                    "ROOT": str(root),
                    "HOSTS": str(self._folder / "hosts"),
                },
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _value(self, variable: Any, pod: Pod) -> str:
        source = variable.get("valueFrom", {})
        if reference := source.get("secretKeyRef"):
            return self._secrets[reference["name"]][reference["key"]]
        if reference := source.get("fieldRef"):
            return {"status.podIP": pod.address, "metadata.name": pod.name}[reference["fieldPath"]]
        return str(variable["value"])

    def _mounts(self, pod: Pod, container: Any) -> Iterator[str]:
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        for mount in container["volumeMounts"]:
            place = f'"$root"{mount["mountPath"]}'
            yield f"mkdir -p {place}\n"
            yield f"mount --bind {self._volume(pod, volumes[mount['name']])} {place}\n"
            if mount.get("readOnly"):
                yield f"mount -o remount,bind,ro {place}\n"

    def _volume(self, pod: Pod, volume: Mapping[str, Any]) -> Path:
        """Returns the folder of a volume, with the owner and mode that Kubernetes sets."""
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        if "secret" in volume:
            name = volume["secret"]["secretName"]
            folder = self._made(f"secret-{name}", 0o755)
            for entry, text in self._secrets[name].items():
                (folder / entry).write_text(text)
            return folder
        if "persistentVolumeClaim" in volume:
            folder = self._made(f"claim-{volume['persistentVolumeClaim']['claimName']}", 0o2775)
            os.chown(folder, 0, pod.spec["securityContext"].get("fsGroup", 0))
            return folder
        in_memory = volume["emptyDir"].get("medium") == "Memory"
        return self._made(f"{pod.name}-{volume['name']}", 0o1777 if in_memory else 0o777)

    def _made(self, name: str, mode: int) -> Path:
        folder = self._folder / "volumes" / name
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(mode)
        return folder

    def probe(self, pod: Pod, kind: str) -> int:
        """Returns the HTTP status of a probe of the pod; 0: no answer."""
        wanted = pod.container[f"{kind}Probe"]["httpGet"]
        port, scheme = ports_of(pod.container)[wanted["port"]], wanted.get("scheme", "HTTP").lower()
        url = f"{scheme}://{pod.address}:{port}{wanted['path']}"
        try:
            context = ssl._create_unverified_context() if scheme == "https" else None
            with urlopen(url, timeout=5, context=context) as answer:
                return int(answer.status)
        except HTTPError as error:
            return error.code
        except OSError:
            return 0

    def wait(self, pod: Pod, kind: str, timeout: float) -> None:
        """Waits until the probe returns 200."""
        deadline = time.monotonic() + timeout
        while self.probe(pod, kind) != 200:
            assert pod.process is not None and pod.process.poll() is None, pod.log.read_text()
            assert time.monotonic() < deadline, pod.log.read_text()
            time.sleep(0.2)
        pod.serves = kind == "readiness"

    def stop(self, *pods: Pod) -> list[int]:
        """Ends pods as Kubernetes does: removes them from Services, runs preStop hooks, sends
        SIGTERM, and waits for the grace period. Returns their exit codes."""
        for pod in pods:
            pod.serves = False
        for pod in pods:
            if before := pod.container.get("lifecycle", {}).get("preStop"):
                subprocess.run(before["exec"]["command"], check=True)
        for pod in pods:
            assert pod.process is not None
            pod.process.send_signal(signal.SIGTERM)
        return [self.ended(pod, pod.spec["terminationGracePeriodSeconds"]) for pod in pods]

    def ended(self, pod: Pod, timeout: float) -> int:
        assert pod.process is not None
        code = pod.process.wait(timeout)
        pod.process = None
        return code

    def replace(self, pod: Pod) -> None:
        """Replaces a pod of a Deployment by a new one, which serves before the old one ends."""
        new = self._pod(f"{pod.name}-next", pod.component, pod.spec)
        self.pods.append(new)
        self._name_pods()
        self.start(new)
        self.wait(new, "readiness", START_TIMEOUT)
        assert self.stop(pod) == [0], pod.log.read_text()
        self.pods.remove(pod)
        self._name_pods()

    def restart(self, *pods: Pod) -> None:
        """Ends pods of StatefulSets and starts them again."""
        assert self.stop(*pods) == [0] * len(pods)
        for pod in pods:
            self.start(pod)
        for pod in pods:
            self.wait(pod, "readiness", START_TIMEOUT)

    def key(self, entry: str) -> str:
        """Returns an entry of the Secret with the keys."""
        (keys,) = [each for each in self._secrets.values() if entry in each]
        return keys[entry]

    def close(self) -> None:
        """Ends running pods and deletes their volumes."""
        for pod in self.pods:
            if pod.process is not None and pod.process.poll() is None:
                os.killpg(pod.process.pid, signal.SIGKILL)
                pod.process.wait()
        shutil.rmtree(self._folder / "volumes", ignore_errors=True)

    # ---- connections ------------------------------------------------------------------------

    def listening(self, pod: Pod) -> set[int]:
        """Returns the ports at which other pods reach this one."""
        return {
            local[1] for local, _, state in self._sockets(pod)
            if state == LISTEN and not local[0].startswith("127.")
        }  # fmt: skip

    def calls(self) -> set[tuple[str, str, int]]:
        """Returns connections between pods, open or recently closed: (from component, to component,
        port)."""
        by_address = {pod.address: pod for pod in self.pods}
        ports = {pod.address: self.listening(pod) for pod in self.pods}
        found = set()
        for pod in self.pods:
            for local, remote, state in self._sockets(pod):
                calls = state != LISTEN and local[1] not in ports[pod.address]
                if calls and remote[1] in ports.get(remote[0], ()):
                    found.add((pod.component, by_address[remote[0]].component, remote[1]))
        return found

    def _sockets(self, pod: Pod) -> Iterator[tuple[tuple[str, int], tuple[str, int], str]]:
        for table in ("tcp", "tcp6"):
            path = Path(f"/proc/{self._network.pid(pod.address)}/net/{table}")
            for line in path.read_text().splitlines()[1:]:
                _, local, remote, state, *_ = line.split()
                yield _place(local), _place(remote), state


def _component(template: Any) -> str:
    return str(template["metadata"]["labels"]["app.kubernetes.io/component"])


LISTEN = "0A"  # net/tcp_states.h


def _place(text: str) -> tuple[str, int]:
    address, _, port = text.partition(":")
    octets = bytes.fromhex(address[-8:])[::-1]  # the last four bytes of an IPv4-mapped IPv6 address
    return ".".join(map(str, octets)), int(port, 16)
