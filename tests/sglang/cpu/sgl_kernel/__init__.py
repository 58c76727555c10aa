"""Stands in for SGLang's compiled kernels, of which there is no wheel for a CPU.

With `--attention-backend torch_native` one of them is called; the others must only be importable.
"""

from collections.abc import Callable
from typing import Any

__version__ = "0.4.10"  # what SGLang 0.5.23 asks for


def assign_req_to_token_pool_cpu(
    rows: Any, table: Any, starts: Any, ends: Any, places: Any, width: int
) -> None:
    """Row `rows[i]` of the table holds, from `starts[i]` to `ends[i]`, the next of `places`."""
    counts = (ends - starts).tolist()
    columns = zip(rows.tolist(), starts.tolist(), ends.tolist(), places.split(counts), strict=True)
    for row, start, end, part in columns:
        table[row, start:end] = part.to(table.dtype)


def __getattr__(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*arguments: object, **options: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU build")

    return absent
