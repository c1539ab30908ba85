"""Pictures of results, where matplotlib is installed."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any


def accuracy_over_length(
    path: pathlib.Path, curves: Mapping[str, Sequence[tuple[int, float, float, float]]], *, trained: int, chance: float
) -> bool:
    """Accuracy over length, a curve with its interval for each method.

    Args:
      path: of the picture.
      curves: (length, accuracy, low, high) of each method.
      trained: the longest length of training, marked by a line.
      chance: accuracy of guessing, marked by a line.

    Returns:
      Whether it was drawn: False without matplotlib.
    """
    plt = _pyplot()
    if plt is None:
        return False
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, points in curves.items():
        lengths, accuracy, low, high = (list(column) for column in zip(*sorted(points), strict=True))
        (line,) = axes.plot(lengths, accuracy, marker="o", markersize=4, label=name)
        axes.fill_between(lengths, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.axvline(trained, color="gray", linestyle=":", linewidth=1)
    axes.axhline(chance, color="gray", linestyle="--", linewidth=1)
    axes.annotate("trained up to here", (trained, 0.04), xytext=(4, 0), textcoords="offset points", color="gray")
    axes.set_xscale("log", base=2)
    _label_lengths(axes, "x", sorted({point[0] for points in curves.values() for point in points}))
    axes.set(xlabel="tokens", ylabel="accuracy", ylim=(-0.03, 1.03))
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True


def curves_over_length(
    path: pathlib.Path,
    panels: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]],
    label: str,
    marks: Mapping[str, int],
) -> bool:
    """Curves over length, both axes logarithmic.

    Args:
      path: of the picture.
      panels: (length, value) of each curve, by panel and name; a name has one colour in all panels.
      label: of the values.
      marks: a length of a panel to mark by a line, the crossover.

    Returns:
      Whether it was drawn: False without matplotlib.
    """
    plt = _pyplot()
    if plt is None:
        return False
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(5.5 * columns, 3.8 * rows), layout="constrained", squeeze=False, sharey=True
    )
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    for axes, (title, curves) in zip(grid.flat, panels.items(), strict=False):
        for name, points in curves.items():
            lengths, values = zip(*sorted(points), strict=True)
            axes.plot(lengths, values, marker="o", markersize=3, color=f"C{names.index(name)}", label=name)
        if title in marks:
            axes.axvline(marks[title], color="gray", linestyle=":", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        _label_lengths(axes, "x", sorted({point[0] for points in curves.values() for point in points}))
        axes.set(title=title, xlabel="tokens", ylabel=label)
    grid.flat[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def heat_map(path: pathlib.Path, cells: Mapping[tuple[int, float], float], *, title: str) -> bool:
    """Accuracy over length and depth of the needle.

    Args:
      path: of the picture.
      cells: accuracy by (length, depth).
      title: of the picture.

    Returns:
      Whether it was drawn: False without matplotlib.
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


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _label_lengths(axes: Any, axis: str, lengths: Sequence[int]) -> None:
    axes.set(**{f"{axis}ticks": list(lengths), f"{axis}ticklabels": [_short(length) for length in lengths]})
    axes.minorticks_off()


def _short(length: int) -> str:
    """512, 1K, 64K, 1M."""
    for size, unit in ((2**20, "M"), (2**10, "K")):
        if length % size == 0:
            return f"{length // size}{unit}"
    return str(length)
