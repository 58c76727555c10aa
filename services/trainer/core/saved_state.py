"""Saves what a step depends on beside the weights: `torch.distributed.checkpoint` in safetensors,
so that one number of ranks can load what another wrote, and nothing is pickled.

`torch.distributed.checkpoint` takes one to two seconds of CPU to import. That happens where a state
is written or read, on the thread which does it: hybrids never do.
"""

from __future__ import annotations

import contextlib
import errno
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from common.errors import StorageFull
from common.records.durable import sync

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def save_state(
    path: Path, state: Mapping[str, Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Writes tensors, or each rank's shards of them, below `path`; every rank of `group` calls it.
    Without a group, one process does.
    """
    from torch.distributed.checkpoint import state_dict_saver as saver
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    path.mkdir(parents=True, exist_ok=True)
    writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
    with _alone_is_fine(), _errors_named():
        saver.save(dict(state), storage_writer=writer, process_group=group, no_dist=group is None)
    for file in [*path.iterdir(), path]:
        sync(file)


def load_state(
    path: Path, state: Mapping[str, Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Fills the tensors of `state` in place from what any number of ranks wrote."""
    from torch.distributed.checkpoint import state_dict_loader as loader
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    reader = HuggingFaceStorageReader(str(path))
    with _alone_is_fine(), _errors_named():
        loader.load(dict(state), storage_reader=reader, process_group=group, no_dist=group is None)


@contextlib.contextmanager
def _errors_named() -> Iterator[None]:
    """What goes wrong as a StorageFull or an OSError: torch's own is no Exception."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        if isinstance(first, OSError) and first.errno in _FULL:
            raise StorageFull(
                "no room for a checkpoint", fix="free some; it is tried again"
            ) from error
        raise OSError(f"a checkpoint cannot be written or read: {first}") from error


@contextlib.contextmanager
def _alone_is_fine() -> Iterator[None]:
    """torch warns whoever saves without a process group, which is what one process does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
