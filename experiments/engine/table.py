"""Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def format_table(header: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    """Returns a Markdown table with aligned columns; columns of numbers are aligned to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    for row in cells:
        if len(row) != len(header):
            raise ValueError(f"a row has {len(row)} cells; it must have {len(header)}, like the header")
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [bool(rows) and all(_is_number(row[column]) for row in cells[1:]) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        return f"| {' | '.join(padded)} |"

    rule = ["-" * (width - 1) + (":" if right else "-") for width, right in zip(widths, numeric, strict=True)]
    return "\n".join([line(cells[0]), line(rule), *map(line, cells[1:])])


def _is_number(text: str) -> bool:
    try:
        float(text.replace(",", ""))
    except ValueError:
        return False
    return True
