"""GGUF files that lie about their sizes: refused in a sentence, without the memory they ask for."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from gguf_files import write_gguf
from paths import MODELS
from pdserve.cli.main import main
from pdserve.common.config.engine import ModelConfig
from pdserve.common.core.errors import ConfigError
from pdserve.demo_model.embedded import resolve_model
from pdserve.demo_model.gguf_file import GGUFFile
from pdserve.demo_model.gguf_folder import write_folder

U32, STRING, ARRAY, U8 = 4, 8, 9, 0
PEAK = 64 * 2**20  # bytes


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def header(*keys: bytes, tensors: tuple[bytes, ...] = (), counts: tuple[int, int] | None = None):
    numbers = counts or (len(tensors), len(keys))
    return b"GGUF" + struct.pack("<IQQ", 3, *numbers) + b"".join(keys) + b"".join(tensors)


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


def tensor(*shape: int, kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text("token_embd.weight") + sizes + struct.pack("<IQ", kind, offset)


NESTED = array(ARRAY, 1, array(U8, 2, b"ab"))
SPARSE = 3 * 2**30  # bytes of a file that occupies a page
CASES: dict[str, tuple[bytes, int, str]] = {  # content, bytes of the file if more, what is said
    "nested arrays": (header(key("x.y", ARRAY, NESTED)), 0, "arrays of arrays"),
    "deep arrays": (header(key("x.y", ARRAY, array(ARRAY, 1) * 4000)), 0, "arrays of arrays"),
    "split.count": (header(key("split.count", STRING, text("two"))), 0, "split.count must be"),
    "sparse string": (
        header(key("a.b", STRING, struct.pack("<Q", 2**31))), SPARSE, "2147483648 bytes in a text"
    ),
    "sparse array": (header(key("a.b", ARRAY, array(U8, 2**31))), SPARSE, "2147483648 values"),
    "sparse texts": (header(key("a.b", ARRAY, array(STRING, 2**28))), SPARSE, "268435456 values"),
    "an array past the end": (header(key("a.b", ARRAY, array(U8, 2**20))), 0, "ends before"),
    "keys": (header(counts=(0, 2**64 - 1)), 0, "18446744073709551615 keys"),
    "tensors": (header(counts=(2**16, 0)), 0, "ends before its 65536 tensors"),
    "dimensions": (header(tensors=(tensor(*[2] * 9),)), 0, "9 dimensions"),
    "shape": (header(tensors=(tensor(2**33, 2**33),)), 0, "the file ends before it"),
    "wrapping shape": (header(tensors=(tensor(2**32, 2**32),)), SPARSE, "the file ends before it"),
    "empty shape": (header(tensors=(tensor(0, 5),)), 0, "a dimension is 0"),
    "offset": (header(tensors=(tensor(1, offset=2**63),)), 0, "the file ends before it"),
    "type": (header(tensors=(tensor(1, kind=77),)), 0, "77 is not a valid"),
    "alignment": (header(key("general.alignment", U32, bytes(4))), 0, "no power of two"),
    "twice": (header(*[key("a.b", U32, bytes(4))] * 2), 0, "there twice"),
    "text": (header(key("a.b", STRING, struct.pack("<Q", 2) + b"\xff\xfe")), 0, "invalid start"),
    "heads": (
        header(
            key("general.architecture", STRING, text("llama")),
            key("llama.attention.head_count", U32, bytes(4)),
        ), 0, "must be a positive whole number",
    ),
}  # fmt: skip


def written(folder: Path, content: bytes, nbytes: int = 0) -> Path:
    path = folder / "a.gguf"
    path.write_bytes(content)
    with path.open("r+b") as file:
        file.truncate(max(nbytes, len(content)))
    return path


@pytest.mark.parametrize("name", CASES)
def test_counts_are_checked_against_the_file(name: str, tmp_path: Path) -> None:
    content, nbytes, said = CASES[name]
    path = written(tmp_path, content, nbytes)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError) as caught:
            write_folder(path, tmp_path, with_tokenizer=True)
        assert tracemalloc.get_traced_memory()[1] < PEAK
    finally:
        tracemalloc.stop()
    assert said in caught.value.message and str(path) in caught.value.message


def mutated(raw: bytes, head: int, random_: random.Random) -> bytes:
    data = bytearray(raw)
    for _ in range(random_.choice([1, 1, 1, 2, 8])):
        at = random_.randrange(4, head)
        edits: list[Callable[[], bytes]] = [
            lambda: random_.randbytes(1),
            lambda: struct.pack("<Q", random_.choice([0, 1, 2**31, 2**40, 2**63, 2**64 - 1])),
            lambda: struct.pack("<I", random_.choice([0, 3, 8, 9, 255, 2**31])),
        ]
        edit = random_.choice(edits)()
        data[at : at + len(edit)] = edit
    if random_.random() < 0.1:
        del data[random_.randrange(head) :]
    return bytes(data)


@pytest.mark.parametrize("times", [60, pytest.param(5000, marks=pytest.mark.slow)])
def test_a_changed_file_is_read_or_refused(times: int, tmp_path: Path) -> None:
    """Bytes of its header are changed at random; nothing but a ConfigError is raised."""
    path = write_gguf(MODELS / "qwen2", tmp_path / "whole.gguf", lambda _: "F32")
    raw, head = path.read_bytes(), min(t.offset for t in GGUFFile.read(path).tensors.values())
    random_ = random.Random(48)
    refused = 0
    for number in range(times):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            write_folder(written(tmp_path, mutated(raw, head, random_)), folder, True)
        except ConfigError as error:
            assert "\n" not in error.message
            refused += 1
    assert times / 2 < refused < times


def test_conversion_has_bounds_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a file makes a library do: the process that wants the model continues."""
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))

    def hostile(*_: object) -> None:
        raise BaseException("called `Option::unwrap()` on a `None` value")

    path = write_gguf(MODELS / "qwen2", tmp_path / "a.gguf", lambda _: "F32")
    monkeypatch.setattr("pdserve.demo_model.gguf_folder.write_tokenizer", hostile)
    with pytest.raises(ConfigError, match=r"converting .*a.gguf fails: BaseException: called"):
        resolve_model(ModelConfig(model=str(path)))
    assert not [each for each in (tmp_path / "cache" / "gguf").iterdir() if each.is_dir()]


@pytest.mark.parametrize("command", ["model FILE", "plan --model FILE", "up --model FILE --port 0"])
def test_commands_refuse_a_hostile_file(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    content, nbytes, said = CASES["sparse array"]
    path = written(tmp_path, content, nbytes)
    try:
        code: object = main([str(path) if word == "FILE" else word for word in command.split()])
    except SystemExit as error:
        code = error.code
    assert code == 2
    shown = "".join(capsys.readouterr().err.split())
    assert said.replace(" ", "") in shown and "Traceback" not in shown
