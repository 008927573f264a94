"""The first run on a GPU, in ten minutes: which features work, exact output, speed of steps.

    OUT=DIR scripts/first-gpu-run [--seconds 570] [--stages machine,kernels,…] [--cpu]

Each stage is a process with a time limit, so one that fails or hangs does not stop the others.
After each stage the results so far are written to `DIR/first-gpu-run.json`; the run ends with a
table and `DIR/first-gpu-run.log`. `--cpu` runs the stages that a CPU can run, with small sizes, to
try the script. docs/gpu.md explains the table and lists what has never run on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import gpu_kernels
from benchmarks.gpu_clusters import CLUSTERS, Served, text_of_cluster
from benchmarks.gpu_shapes import SHAPES, make_shape

ROOT = Path(__file__).parents[1]
WHEELS = ROOT / "build" / "gpu-wheels"
WORK = ROOT / "build" / "first-gpu-run"  # emptied at the start
LOG_CHARS = 100_000
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5"]
OK, FAILED, NOT_RUN = "ok", "failed", "not run"


@dataclass(slots=True)
class Result:
    """One line of the table. `seconds`: of the stage. `details`: for the JSON only."""

    stage: str
    verdict: str
    says: str = ""
    seconds: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)


class Run:
    """The state that stages share: the device, a folder for logs and models, and the time that is
    left."""

    def __init__(self, seconds: float, on_cpu: bool) -> None:
        self.work, self.on_cpu = WORK, on_cpu
        shutil.rmtree(WORK, ignore_errors=True)
        WORK.mkdir(parents=True)
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    @property
    def device(self) -> str:
        return "cpu" if self.on_cpu else "cuda"

    def command(self, name: str, command: Sequence[str], limit: float) -> tuple[int, str]:
        """Runs a command for at most `limit` seconds; returns its exit code (124: time-out) and the
        last line of its output. `name.log` has all of the output."""
        log = self.work / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
            )
            try:
                code = process.wait(min(limit, self.left))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
                code = 124
        lines = log.read_text(errors="replace").strip().splitlines()
        return code, lines[-1] if lines else ""

    def checked(self, name: str, command: Sequence[str], limit: float) -> Result:
        code, last = self.command(name, command, limit)
        late = f"more than {limit:.0f} s; " if code == 124 else ""
        return Result(name, FAILED if code else OK, f"{late}{last}", details={"exit": code})


# ---- the stages, the most important first ----


def machine(run: Run) -> Iterator[Result]:
    """Reports the machine and the versions, and unpacks FlashInfer's modules compiled before."""
    result = run.checked("machine", [sys.executable, "-c", VERSIONS], 60)
    if number := gpu_kernels.unpack(WHEELS):
        result.says += f"; {number} modules compiled before"
    yield result
    if not run.on_cpu:
        yield run.checked("nvidia-smi", ["nvidia-smi", *NVIDIA_SMI], 30)


NVIDIA_SMI = ("--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader")
VERSIONS = """
import importlib.metadata as m, platform, torch
names = ("torch", "flashinfer-python", "transformers", "grpcio", "triton")
found = [f"{name} {m.version(name)}" for name in names if list(m.distributions(name=name))]
gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
print(f"{gpu}; Python {platform.python_version()}, {', '.join(found)}")
"""


def doctor(run: Run) -> Iterator[Result]:
    """Checks the host, and compiles a Triton kernel and FlashInfer's for bfloat16 with heads of
    128."""
    command = ["pdserve", "doctor", "--json", *([] if run.on_cpu else ["--gpu"])]
    result = run.checked("doctor", command, 310)
    if result.details["exit"] not in (0, 1):
        yield result
        return
    found = json.loads((run.work / "doctor.log").read_text())
    wrong = [f"{each['subject']}: {each['seen']}" for each in found if each["verdict"] != "ok"]
    result.says = "; ".join(wrong) or "all in order"
    result.details["findings"] = found
    yield result


def triton(run: Run) -> Iterator[Result]:
    """Compares the Triton kernels with plain torch, and fills Triton's cache for the clusters."""
    files = map(str, sorted((ROOT / "tests/common/model").glob("test_triton_*.py")))
    yield run.checked("triton", [*PYTEST, *files, "-k", "not compile_for_gpus"], 120)


def kernels(run: Run) -> Iterator[Result]:
    """Compares kernels with plain torch, without other heads and float16 (long compiles)."""
    chosen = "not flashinfer or (128 and bfloat16)"
    yield run.checked("kernels", [*PYTEST, "tests/gpu/test_gpu_kernels.py", "-k", chosen], 200)


def fused(run: Run) -> Iterator[Result]:
    """Times each fused kernel beside torch's operators."""
    result = run.checked("fused", [sys.executable, "-m", "benchmarks.fused_kernels"], 60)
    if result.verdict == OK:
        found = json.loads((run.work / "fused.log").read_text().splitlines()[-1])
        result.details["kernels"] = found
        result.says = "; ".join(
            f"{each['kernel']} of {each['tokens']}: {each['triton_us']:.0f} µs, torch's "
            f"{each['torch_us']:.0f} (difference {each['error']:.2g})"
            for each in found
        )
    yield result


def steps(run: Run) -> Iterator[Result]:
    """Tests the sampler, replayed graphs against eager steps, and waits of the host."""
    files = ["tests/gpu/test_gpu_steps.py", "tests/common/model/test_fake_forward.py"]
    yield run.checked("steps", [*PYTEST, *files], 120)


def clusters(run: Run) -> Iterator[Result]:
    """One prefill and one decode node on this device over each connector, with and without graphs
    and asynchronous scheduling. Within a dtype all must say the same text."""
    served: list[tuple[str, Served]] = []
    for name, cluster in CLUSTERS.items():
        if run.on_cpu and not cluster.on_cpu:
            continue
        if run.left < 40:
            yield Result(f"cluster {name}", NOT_RUN, "no time left")
            continue
        found = text_of_cluster(cluster, run.work / f"cluster-{name}.log", run.device, run.left)
        served.append((cluster.group, found))
        said = f"text {found.digest[:12]} in {found.answer_seconds:.2f} s"
        says = found.error or f"{said}, ready in {found.ready_seconds:.0f} s"
        yield Result(f"cluster {name}", FAILED if found.error else OK, says, details=asdict(found))
    yield from _agreements(served)


def _agreements(served: Sequence[tuple[str, Served]]) -> Iterator[Result]:
    for group in dict.fromkeys(group for group, _ in served):
        digests = {found.digest for each, found in served if each == group and not found.error}
        count = sum(each == group and not found.error for each, found in served)
        if count > 1:
            same = len(digests) == 1
            says = f"{count} clusters, {len(digests)} different text" + "s" * (not same)
            yield Result(f"exact {group}", OK if same else FAILED, says)


def speeds(run: Run) -> Iterator[Result]:
    """Times steps of models with random weights: ÷ floor (bytes ÷ measured bandwidth)."""
    for name in ("tiny",) if run.on_cpu else ("0.6B", "0.6B eager", "8B"):
        if run.left < 30:
            yield Result(f"bench {name}", NOT_RUN, "no time left")
            continue
        shape, _, eager = name.partition(" ")
        folder = make_shape(run.work / f"shape-{shape}", SHAPES[shape])
        file = run.work / f"bench-{name.replace(' ', '-')}.json"
        cells = ["--batch", "1,8,32", "--context", "1024", "--chunk", "2048"]
        if run.on_cpu:
            cells = ["--batch", "1,4", "--context", "64", "--repetitions", "3"]
        command = ["pdserve", "bench", "step", "--model", str(folder), "--load-format", "dummy"]
        command += ["--device", run.device, "--json", str(file), *cells]
        command += ["--enforce-eager"] if eager else []
        result = run.checked(f"bench {name}", command, 150)
        if result.verdict == OK:
            result.details = json.loads(file.read_text())
            result.says = _speeds(result.details)
        yield result


def _speeds(found: dict[str, Any]) -> str:
    words = [f"{found['read_gb_per_s']:,.0f} GB/s, {found['peak_gflops'] / 1e3:,.1f} TFLOP/s"]
    for name, cell in found["cells"].items():
        step = cell["step"]
        words.append(f"{name}: {step['ms']:.2f} ms ({step['ratio']:.2f} × floor)")
    return "; ".join(words)


Stage = Callable[[Run], Iterator[Result]]
STAGES: dict[str, Stage] = {
    "machine": machine,
    "doctor": doctor,
    "triton": triton,
    "kernels": kernels,
    "fused": fused,
    "steps": steps,
    "clusters": clusters,
    "speeds": speeds,
}
NEED_GPU = ("triton", "kernels", "fused", "steps")


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    run, results = Run(options.seconds, options.cpu), []
    out = Path(os.environ.get("OUT", WORK))
    out.mkdir(parents=True, exist_ok=True)
    for name in options.stages.split(","):
        for result in _results(name, run):
            results.append(result)
            print(f"{result.verdict:8} {result.stage:22} {result.seconds:5.0f} s  {result.says}")
            _write(out / "first-gpu-run.json", results)
    _table(results)
    gpu_kernels.pack(out)
    _write_log(out / "first-gpu-run.log", run.work)
    return 1 if any(result.verdict == FAILED for result in results) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="first-gpu-run", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=570.0, help="time limit of all stages together"
    )
    parser.add_argument(
        "--stages", default=",".join(STAGES), help="stages to run, separated by commas"
    )
    parser.add_argument(
        "--cpu", action="store_true", help="run what a CPU can run, with small sizes"
    )
    return parser


def _results(name: str, run: Run) -> Iterator[Result]:
    """Runs a stage; an exception becomes its result."""
    if run.left <= 0 or (run.on_cpu and name in NEED_GPU):
        yield Result(name, NOT_RUN, "needs a GPU" if run.on_cpu else "no time left")
        return
    started = time.monotonic()
    try:
        for result in STAGES[name](run):
            result.seconds = time.monotonic() - started
            yield result
            started = time.monotonic()
    except Exception as error:
        yield Result(name, FAILED, f"{type(error).__name__}: {error}", time.monotonic() - started)


def _write(file: Path, results: Sequence[Result]) -> None:
    file.write_text(json.dumps([asdict(each) for each in results], indent=2) + "\n")


def _write_log(file: Path, work: Path) -> None:
    """Writes the ends of all logs into one file, in the order of their creation."""
    logs = sorted(work.glob("*.log"), key=lambda log: log.stat().st_ctime)
    parts = [f"==== {log.name}\n{log.read_text(errors='replace')[-LOG_CHARS:]}" for log in logs]
    file.write_text("\n".join(parts))


def _table(results: Sequence[Result]) -> None:
    print("\n| stage | verdict | s | |\n|---|---|---|---|")
    for each in results:
        print(f"| {each.stage} | {each.verdict} | {each.seconds:.0f} | {each.says} |")


if __name__ == "__main__":
    sys.exit(main())
