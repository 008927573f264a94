"""The conformance kit passes what is right and fails what is broken, on the check meant for it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import time
import tomllib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

import told
import warm_kit
from broken_connectors import MUTANTS, Tampered
from paths import EXAMPLE, ROOT
from pdserve.kv_transfer.conformance.ends import EventLog
from pdserve.kv_transfer.connector import Failed, Landed
from pdserve.kv_transfer.selection import ENTRY_POINTS
from segments import LEFT_ON_PURPOSE, SHM
from thinned import only, slow
from warm import shared

KIT = ROOT / "kv_transfer" / "conformance"
ALL_CHECKS = ("--pyargs", "pdserve.kv_transfer.conformance")
CONTROL = "test_delivery.py::test_blocks_arrive[1]"  # every broken connector passes it
PATIENCE = 1200.0  # seconds; on quiet cores the longest takes 30
PART = 7  # broken connectors that share a run
FEW = MUTANTS[::12]  # of `make test`
REST = [mutant for mutant in MUTANTS if mutant not in FEW]
PARTS = [FEW, *(REST[first : first + PART] for first in range(0, len(REST), PART))]
BUILT_IN = ("shm", "tcp", "nccl")
FIRST = {  # what `make test` checks of runs of which it does not check all
    "nccl": ("test_cancel.py", "test_delivery.py"),  # what its group does that sockets do not
    "page": ("test_calls.py",),
}
FILES = sorted(path.name for path in KIT.glob("test_*.py"))
pytestmark = pytest.mark.timeout(PATIENCE)

Outcomes = dict[str, str]  # check → why it did not pass, or ""


class Runs:
    """Runs of the kit, each in a process and a folder of its own, three at a time: they wait
    more than they work."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(3)
        shared()  # by one thread
        self._runs: dict[str, Future[Outcomes]] = {}

    def start(self, name: str, *args: str, source: Path | None = None) -> None:
        """`source`: what the folder holds from the beginning."""
        folder = self._folder / name
        shutil.copytree(source, folder) if source else folder.mkdir()
        self._runs[name] = self._pool.submit(run_kit, folder, args)

    def outcomes(self, name: str, part: str) -> Outcomes:
        """Returns those of the checks that have `part` in their name, once they are over."""
        while True:
            ended = self._runs[name].done()
            checks, outcomes = told.read(self._folder / name)
            if checks and all(check in outcomes for check in checks if part in check):
                return {check: why for check, why in outcomes.items() if part in check}
            if ended:
                raise AssertionError(f"not all were run: {self._runs[name].result()}")
            time.sleep(0.05)

    def close(self) -> None:
        """A run that crashed after its last check fails here."""
        self._pool.shutdown(cancel_futures=True)
        for run in self._runs.values():
            if not run.cancelled():
                run.result()


def run_kit(folder: Path, args: tuple[str, ...]) -> Outcomes:
    """In `folder`, warm; connectors are found there, among the helpers and in the example."""
    code, said = warm_kit.run(folder, [*args], PATIENCE)
    assert code in (0, 1), said
    return told.read(folder)[1]


def named(*connectors: str) -> list[str]:
    return [part for name in connectors for part in ("--kv-connector", name)]


def check_id(check: str, connector: str) -> str:
    """pytest's name of a check on a connector, which comes before other parameters."""
    test, _, parameter = check.rstrip("]").partition("[")
    return f"{test}[{'-'.join(filter(None, (connector, parameter)))}]"


def name_of(mutant: type[Tampered]) -> str:
    return f"broken_connectors:{mutant.__name__}"


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Runs]:
    runs = Runs(tmp_path_factory.mktemp("conformance"))
    items = request.session.items
    wanted = list(wanted_by(items))
    for number, part in enumerate(PARTS):  # in the order in which tests wait for them
        if any(each in wanted for each in part):
            start_mutants(runs, number)
    for name in BUILT_IN:
        if name in wanted:
            runs.start(name, *named(name), *checks_of(name, items))
    shared = tmp_path_factory.mktemp("shared")
    options = ("--kv-connector-config", json.dumps({"directory": str(shared)}))
    _, example = entry_point((EXAMPLE / "pyproject.toml").read_text())
    if "example" in wanted:
        runs.start("example", *named(example), *options, *ALL_CHECKS)
    page = tmp_path_factory.mktemp("page")
    (page / "my_package").mkdir()
    (page / "my_package" / "connector.py").write_text(block_of_page("python"))
    if "page" in wanted:
        runs.start("page", *page_command(), *checks_of("page", items), source=page)
    yield runs
    try:
        runs.close()
    finally:
        for path in Path(SHM).glob(f"{LEFT_ON_PURPOSE}*"):
            path.unlink()
    assert not list(shared.iterdir()), "the example left files in its directory"


def wanted_by(items: Iterable[pytest.Item]) -> Iterator[object]:
    """Connectors and runs that the tests of this session ask for."""
    for item in items:
        if item.path == Path(__file__) and hasattr(item, "callspec"):
            yield from item.callspec.params.values()


def checks_of(run: str, items: Iterable[pytest.Item]) -> Iterable[str]:
    """The files of the kit that tests of this session ask a run for; most ask for all."""
    params = [item.callspec.params for item in items if hasattr(item, "callspec")]
    files = {each.get("file") for each in params if each.get("run") == run}
    return ALL_CHECKS if None in files else [str(KIT / file) for file in sorted(files)]


def start_mutants(runs: Runs, number: int) -> None:
    mutants = PARTS[number]
    checks = {  # in order, each once
        f"{KIT}/{check_id(check, name_of(mutant))}": None
        for mutant in mutants
        for check in (CONTROL, mutant.caught_by)
    }
    runs.start(f"mutants {number}", *named(*map(name_of, mutants)), *checks)


def block_of_page(language: str) -> str:
    """The one code block of docs/write-a-connector.md in `language`."""
    page = (ROOT / "docs" / "write-a-connector.md").read_text(encoding="utf-8")
    (block,) = re.findall(rf"```{language}\n(.*?)```", page, re.S)
    return str(block)


def page_command() -> list[str]:
    """The page's arguments of pytest but for its checks, which are all, with the connector by its
    import string: it is not installed here."""
    _, *arguments = shlex.split(block_of_page("bash"))
    assert {*ALL_CHECKS} <= {*arguments}
    name, where = entry_point(block_of_page("toml"))
    return [where if each == name else each for each in arguments if each not in ALL_CHECKS]


def entry_point(pyproject: str) -> tuple[str, str]:
    """Name and import string of the one connector that a package brings."""
    ((name, where),) = tomllib.loads(pyproject)["project"]["entry-points"][ENTRY_POINTS].items()
    return name, where


@pytest.mark.parametrize("mutant", only(MUTANTS, FEW), ids=lambda mutant: mutant.__name__)
def test_a_broken_connector_is_caught(runs: Runs, mutant: type[Tampered]) -> None:
    number = next(number for number, part in enumerate(PARTS) if mutant in part)
    name = name_of(mutant)
    outcomes = runs.outcomes(f"mutants {number}", f"[{name}")
    assert outcomes[check_id(mutant.caught_by, name)], "the check meant for it passed"
    assert not outcomes[check_id(CONTROL, name)], "it is broken altogether"


@pytest.mark.parametrize(
    ("run", "file"),
    [
        slow(run, file)
        if run == "example" or (run in FIRST and file not in FIRST[run])
        else (run, file)
        for run in (*BUILT_IN, "example", "page")
        for file in FILES
    ],
)
def test_correct_connectors_pass(runs: Runs, run: str, file: str) -> None:
    outcomes = runs.outcomes(run, f"{file}::")
    assert outcomes
    assert {name: why for name, why in outcomes.items() if why} == {}


@pytest.mark.parametrize("run", ["shm", "tcp", slow("nccl"), slow("example"), slow("page")])
def test_everything_is_checked(runs: Runs, run: str) -> None:
    assert len(runs.outcomes(run, "")) > 70


@pytest.mark.slow
def test_nothing_is_checked_unasked(tmp_path: Path) -> None:
    """A pytest that collects the kit's folder by accident runs none of it."""
    outcomes = run_kit(tmp_path, ALL_CHECKS)
    assert outcomes and all(outcomes.values())


def test_a_try_that_was_given_up_may_fail_before_the_next_lands() -> None:
    events = EventLog()
    events.put(Failed(b"id", 1, "EXPIRED", "prefill", True, "its blocks were freed"))
    events.put(Landed(b"id", 2, 0))
    assert events.wait(Landed, b"id", within=0, epoch=2).epoch == 2
    with pytest.raises(AssertionError, match="its blocks were freed"):
        events.wait(Landed, b"id", within=0, epoch=1)
