"""Faults of a rank that can be repaired, sent as an answer: an error would lose the group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from meshrl.common.api.ranks import RankFault
from meshrl.common.base.errors import CorruptData, MeshError, NotFound, StorageFull, from_wire

OS_ERROR_CODE = "os_error"  # the code of an OSError
READ_FAULTS = CorruptData, NotFound  # it is repaired, or older state is restored
WRITE_FAULTS = StorageFull, OSError  # the next checkpoint tries again


def describe_fault(error: MeshError | OSError) -> RankFault:
    if isinstance(error, MeshError):
        return RankFault(error.code, error.message, error.where, error.fix)
    return RankFault(OS_ERROR_CODE, f"{type(error).__name__}: {error}")


def run_and_report(
    kinds: tuple[type[MeshError | OSError], ...], work: Callable[..., Any], *args: Any
) -> RankFault:
    """Run `work`; return the fault that an error of these kinds describes."""
    try:
        work(*args)
    except kinds as error:
        return describe_fault(error)
    return RankFault()


def raise_first(faults: Iterable[RankFault]) -> None:
    """Raise the first fault as its original error."""
    for fault in faults:
        if fault.code == OS_ERROR_CODE:
            raise OSError(fault.message)
        if fault.code:
            error = from_wire(fault.code, fault.message, fault.where)
            error.fix = fault.fix
            raise error
