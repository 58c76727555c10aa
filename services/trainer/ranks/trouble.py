"""What hinders a rank and can be mended travels as an answer: an error loses the group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from meshrl.common.api.ranks import Trouble
from meshrl.common.base.errors import Damaged, MeshError, NotFound, StorageFull, from_wire

OF_THE_SYSTEM = "os_error"  # the code of an OSError
UNREADABLE = Damaged, NotFound  # it is mended, or gone on from something older
UNWRITABLE = StorageFull, OSError  # it is tried again with the next checkpoint


def trouble_of(error: MeshError | OSError) -> Trouble:
    if isinstance(error, MeshError):
        return Trouble(error.code, error.message, error.where, error.fix)
    return Trouble(OF_THE_SYSTEM, f"{type(error).__name__}: {error}")


def tried(
    kinds: tuple[type[MeshError | OSError], ...], work: Callable[..., Any], *args: Any
) -> Trouble:
    """Does `work`; what of these kinds has hindered it."""
    try:
        work(*args)
    except kinds as error:
        return trouble_of(error)
    return Trouble()


def raise_first(told: Iterable[Trouble]) -> None:
    """Raises the first that hindered somebody, as what it was."""
    for trouble in told:
        if trouble.code == OF_THE_SYSTEM:
            raise OSError(trouble.why)
        if trouble.code:
            error = from_wire(trouble.code, trouble.why, trouble.where)
            error.fix = trouble.fix
            raise error
