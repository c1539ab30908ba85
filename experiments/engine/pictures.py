"""Pictures of results. They need matplotlib; without it, nothing is drawn."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

NOT_DRAWN = 'Pictures need matplotlib: pip install -e ".[data]"'

MOST_IN_PANEL = 8  # With more curves, there is one legend beside all diagrams instead of one in each.
# x, y, and the ends of the interval of y.
Point = tuple[float, float, float, float]


def accuracy_over_length(
    path: pathlib.Path, curves: Mapping[str, Sequence[Point]], *, trained: int, chance: float
) -> bool:
    """Draws accuracy over length, a curve with its interval for each method.

    Args:
      path: Path of the picture.
      curves: Points (length, accuracy, low, high) of each method.
      trained: Longest length of training, marked by a line.
      chance: Accuracy of guessing, marked by a line.

    Returns:
      Whether the picture was drawn; False without matplotlib.
    """
    plt = _pyplot()
    if plt is None:
        return False
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    _draw_curves(axes, curves)
    axes.axvline(trained, color="gray", linestyle=":", linewidth=1)
    axes.axhline(chance, color="gray", linestyle="--", linewidth=1)
    axes.annotate("trained up to here", (trained, 0.04), xytext=(4, 0), textcoords="offset points", color="gray")
    axes.set_xscale("log", base=2)
    _label_lengths(axes, "x", sorted({int(point[0]) for points in curves.values() for point in points}))
    axes.set(xlabel="tokens", ylabel="accuracy", ylim=(-0.03, 1.03))
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True


@dataclasses.dataclass(frozen=True)
class Panel:
    """A diagram of a picture.

    Attributes:
      title: Title above the diagram.
      xlabel: Label of the first axis.
      ylabel: Label of the second axis.
      curves: Points of each curve, by name.
      dashed: Names of the curves that are dashed, in the colour of the curve before them.
      lengths: Whether the first axis is logarithmic, with a tick at each length.
      log_y: Whether the second axis is logarithmic.
      mark: Place on the first axis that is marked by a line, None for no line.
    """

    title: str
    xlabel: str
    ylabel: str
    curves: Mapping[str, Sequence[Point]]
    dashed: Sequence[str] = ()
    lengths: bool = False
    log_y: bool = False
    mark: float | None = None


def panels(path: pathlib.Path, parts: Sequence[Panel], *, columns: int | None = None) -> bool:
    """Draws diagrams in rows of `columns`, and returns whether it could; False without matplotlib."""
    plt = _pyplot()
    if plt is None:
        return False
    columns = min(columns or len(parts), len(parts))
    rows = math.ceil(len(parts) / columns)
    size = (4.4 * columns, 3.8 * rows)
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axes in grid.flat[len(parts) :]:
        axes.axis("off")
    names = list(dict.fromkeys(name for part in parts for name in part.curves if name not in part.dashed))
    for axes, part in zip(grid.flat, parts, strict=False):
        _draw_curves(axes, part.curves, part.dashed, names)
        axes.set(title=part.title, xlabel=part.xlabel, ylabel=part.ylabel)
        if part.lengths:
            axes.set_xscale("log", base=2)
            _label_lengths(axes, "x", sorted({int(point[0]) for points in part.curves.values() for point in points}))
        if part.log_y:
            axes.set_yscale("log")
        if part.mark is not None:
            axes.axvline(part.mark, color="gray", linestyle=":", linewidth=1)
        if len(names) <= MOST_IN_PANEL:
            axes.legend(fontsize="x-small")
    if len(names) > MOST_IN_PANEL:
        lines = {line.get_label(): line for axes in grid.flat for line in axes.lines}
        figure.legend([lines[name] for name in names], names, loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=80)
    plt.close(figure)
    return True


def bars(path: pathlib.Path, groups: Mapping[str, Mapping[str, tuple[float, float, float]]], label: str) -> bool:
    """Draws bars with intervals. A name has one colour in all groups.

    Args:
      path: Path of the picture.
      groups: Value and ends of its interval, by group and name.
      label: Label of the second axis.

    Returns:
      Whether the picture was drawn; False without matplotlib.
    """
    plt = _pyplot()
    if plt is None:
        return False
    names = list(dict.fromkeys(name for members in groups.values() for name in members))
    figure, axes = plt.subplots(figsize=(2 + 1.6 * len(groups), 4), layout="constrained")
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        found = [(place, members[name]) for place, members in enumerate(groups.values()) if name in members]
        places = [place + (index - (len(names) - 1) / 2) * width for place, _ in found]
        values = [value for _, (value, _, _) in found]
        errors = [
            [value - low for _, (value, low, _) in found],
            [high - value for _, (value, _, high) in found],
        ]
        axes.bar(places, values, width, yerr=errors, color=f"C{index}", label=name, error_kw={"linewidth": 1})
    axes.set_xticks(range(len(groups)), list(groups), rotation=20, ha="right")
    axes.set(ylabel=label, ylim=(0, None))
    axes.legend(fontsize="small", ncols=len(names))
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True


def heat_map(path: pathlib.Path, cells: Mapping[tuple[int, float], float], *, title: str) -> bool:
    """Draws accuracy over length and depth of the needle.

    Args:
      path: Path of the picture.
      cells: Accuracy by (length, depth).
      title: Title of the picture.

    Returns:
      Whether the picture was drawn; False without matplotlib.
    """
    plt = _pyplot()
    if plt is None:
        return False
    lengths, depths = sorted({length for length, _ in cells}), sorted({depth for _, depth in cells})
    values = [[cells.get((length, depth), float("nan")) for length in lengths] for depth in depths]
    figure, axes = plt.subplots(figsize=(1.5 + 0.75 * len(lengths), 1.5 + 0.45 * len(depths)), layout="constrained")
    image = axes.imshow(values, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            if value == value:  # not NaN
                color = "black" if 0.15 < value < 0.85 else "white"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize="small", color=color)
    axes.set(title=title, xlabel="tokens", ylabel="depth of the needle")
    axes.set_xticks(range(len(lengths)), [_short(length) for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths])
    figure.colorbar(image, label="accuracy")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True


def _draw_curves(
    axes: Any, curves: Mapping[str, Sequence[Point]], dashed: Sequence[str] = (), names: Sequence[str] = ()
) -> None:
    """Draws curves. The place of a curve in `names`, or among the curves, sets its colour and marker."""
    color, names = "C0", names or [name for name in curves if name not in dashed]
    for name, points in curves.items():
        x, y, low, high = (list(column) for column in zip(*sorted(points), strict=True))
        style: dict[str, Any] = {"linestyle": "--"}
        if name not in dashed:
            place = names.index(name)
            color, style = f"C{place % 10}", {"marker": "os^v"[place // 10 % 4], "markersize": 4}
        axes.plot(x, y, label=name, color=color, **style)
        axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _label_lengths(axes: Any, axis: Literal["x", "y"], lengths: Sequence[int]) -> None:
    axes.set(**{f"{axis}ticks": list(lengths), f"{axis}ticklabels": [_short(length) for length in lengths]})
    if len(lengths) > 8:
        axes.tick_params(axis=axis, labelrotation=45)
    axes.minorticks_off()


def _short(length: int) -> str:
    """Formats a length for an axis: 512, 1K, 64K, 1M."""
    for size, unit in ((2**20, "M"), (2**10, "K")):
        if length % size == 0:
            return f"{length // size}{unit}"
    return str(length)
