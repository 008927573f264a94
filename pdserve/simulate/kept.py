"""Keeps what `pdserve calibrate` has measured so far, so that an interrupted run can continue."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdserve.common.core.errors import ConfigError

Point = tuple[str, int, int]  # the kind of measurement, and its two counts
Found = list[tuple[tuple[Any, ...], float]]  # (what was measured, a number)
Samples = dict[tuple[Any, ...], list[float]]  # by what was measured


class Kept:
    """The measurements by turn and point, in memory and in a file with a line for each point. The
    file begins with `options`; its last line may be cut off."""

    def __init__(self, path: Path | None = None, options: Mapping[str, Any] | None = None) -> None:
        """Raises ConfigError if the file is of other options, or cannot be read."""
        self._path, self._head = path, {"options": options}
        self._turns: defaultdict[int, dict[Point, Found]] = defaultdict(dict)
        self._size = 0  # bytes of whole lines
        if path is not None and path.is_file():
            self._read(path)

    def turn(self, number: int) -> dict[Point, Found]:
        return self._turns[number]

    def add(self, number: int, point: Point, found: Found) -> None:
        """Raises OSError if the file cannot be written."""
        self._turns[number][point] = found
        if self._path is not None:
            self._write(self._path, {"turn": number, "point": point, "found": found})

    def whole(self, plan: Sequence[Point]) -> list[Samples]:
        """Returns the samples of the turns that have all points, in order."""
        turns = [self._turns[number] for number in sorted(self._turns)]
        return [merged(each) for each in turns if all(point in each for point in plan)]

    def num_points(self) -> int:
        """Returns the number of points in all turns."""
        return sum(map(len, self._turns.values()))

    def remove(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _write(self, path: Path, line: Mapping[str, Any]) -> None:
        lines = [line] if self._size else [self._head, line]
        data = "".join(f"{json.dumps(each)}\n" for each in lines).encode()
        with path.open("r+b" if self._size else "wb") as file:
            file.seek(self._size)  # over a line that was cut off
            file.write(data)
            file.truncate()
        self._size += len(data)

    def _read(self, path: Path) -> None:
        lines = path.read_bytes().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        try:
            told: list[dict[str, Any]] = [json.loads(line) for line in lines] or [self._head]
            for line in told[1:]:
                found = [(tuple(name), float(number)) for name, number in line["found"]]
                kind, one, two = line["point"]
                self._turns[line["turn"]][kind, one, two] = found
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path} is not from this command: remove it") from error
        if told[0] != json.loads(json.dumps(self._head)):
            raise ConfigError(
                f"{path} has measurements of an interrupted run with other options or on another "
                "CPU: repeat its options to continue it, or remove the file"
            )
        self._size = sum(map(len, lines))


def merged(turn: Mapping[Point, Found]) -> Samples:
    samples: Samples = {}
    for name, number in (each for found in turn.values() for each in found):
        samples.setdefault(name, []).append(number)
    return samples
