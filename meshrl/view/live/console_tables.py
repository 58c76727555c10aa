"""Printer of tables whose names can be copied: names of hosts, jobs, workers and keys are never
cut.
"""

from __future__ import annotations

import sys

from rich.cells import cell_len
from rich.table import Table

from meshrl.common.state.pool.workers.rows import Role
from meshrl.view.terminal import Console

COLUMN_GAP = 3  # blanks between columns
ROLE_COLORS: dict[str, str] = {
    Role.ROLLOUT: "cyan",
    Role.TRAINING: "magenta",
    Role.SCORING: "green",
    Role.IDLE: "bright_black",
}


def make_table(*columns: str, wraps: bool = True) -> Table:
    """Return an empty table of these columns; the last one may wrap."""
    table = Table(box=None, pad_edge=False, padding=(0, COLUMN_GAP, 0, 0))
    for number, column in enumerate(columns, 1):
        no_wrap = not wraps or number < len(columns)
        table.add_column(column, header_style="dim", overflow="fold", no_wrap=no_wrap)
    return table


def print_table(table: Table) -> None:
    """Print a table."""
    make_console(table).print(table)


def make_console(*tables: Table) -> Console:
    """Return a console for the tables, as wide as the terminal or the longest name.

    The terminal wraps a longer line. Output that is no terminal gets whole lines.
    """
    terminal = Console().width if sys.stdout.isatty() else None
    return Console(width=max((measure_width(one, terminal) for one in tables), default=terminal))


def measure_width(table: Table, terminal_columns: int | None) -> int:
    """Return the columns that a table takes on a terminal of so many; None: there is none."""
    found = 0
    for column in table.columns:
        texts = [str(cell) for cell in (column.header, *column.cells)]
        no_wrap = terminal_columns is None or column.no_wrap
        parts = texts if no_wrap else [word for text in texts for word in text.split()]
        found += max((cell_len(line) for part in parts for line in part.splitlines()), default=0)
        found += COLUMN_GAP
    return max(found, terminal_columns or 0)
