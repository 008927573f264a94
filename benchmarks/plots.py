"""Pictures of benchmarks that compare several ways: panels side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Lines = Mapping[str, Sequence[tuple[float, float]]]  # by label
Bars = Mapping[str, Mapping[str, float]]  # by label, then by the name under the bars


def lines(path: Path, panels: Mapping[str, Lines], xlabel: str, ylabel: str) -> None:
    """Draws lines through points (x, y)."""

    def draw(axes: Any, found: Lines) -> None:
        for label, points in found.items():
            axes.plot(*zip(*points, strict=True), "o-", label=label)
        axes.set(xlabel=xlabel)

    _draw(path, panels, ylabel, draw)


def bars(path: Path, panels: Mapping[str, Bars], ylabel: str) -> None:
    """Draws groups of bars, one bar for each label that has the group's name."""

    def draw(axes: Any, found: Bars) -> None:
        names = list(dict.fromkeys(name for values in found.values() for name in values))
        width = 0.8 / len(found)
        for number, (label, values) in enumerate(found.items()):
            at = [names.index(name) + (number - (len(found) - 1) / 2) * width for name in values]
            axes.bar(at, list(values.values()), width, label=label)
        axes.set_xticks(range(len(names)), names, rotation=30, ha="right")

    _draw(path, panels, ylabel, draw)


def _draw(
    path: Path, panels: Mapping[str, Any], ylabel: str, draw: Callable[[Any, Any], None]
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(panels), 3.5), layout="constrained")
    each = figure.subplots(1, len(panels), squeeze=False)[0]
    for (title, found), axes in zip(panels.items(), each, strict=True):
        draw(axes, found)
        axes.set(title=title, ylim=(0, None))
    figure.axes[0].set_ylabel(ylabel)
    figure.axes[0].legend()
    figure.savefig(path, dpi=120)
