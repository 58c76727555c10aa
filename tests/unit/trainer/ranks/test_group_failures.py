"""Failures of process groups: NCCL's environment, silent failures, absent ranks."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from meshrl.common.api.ranks import Rendezvous
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ConfigError, RankLost
from meshrl.common.hardware.gpus import nccl_environment
from meshrl.common.hardware.gpus.nccl_environment import complete_nccl_environment
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.trainer.ranks.group_failures import find_group_failure, is_collective_error
from meshrl.services.trainer.ranks.rank import join_group
from meshrl.services.trainer.ranks.rank_thread import GPU_ERROR_EXIT_STATUS, RankThread
from tests.load import scaled

HEADER = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"


class ExitRecorder(SystemHost):
    """Host whose exits are recorded."""

    exits: list[int]

    def exit(self, code: int, *_: Any, **__: Any) -> Any:
        self.exits.append(code)
        raise SystemError("exit")


def make_thread() -> tuple[RankThread, list[int]]:
    host = ExitRecorder()
    host.exits = []
    mesh: Any = SimpleNamespace(host=host, clock=SystemClock())
    return RankThread(mesh, scaled(20.0)), host.exits


def test_nccl_aborts_communicators_and_leaves_the_process() -> None:
    added = complete_nccl_environment({})
    assert added["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
    assert added["TORCH_NCCL_ENABLE_MONITORING"] == added["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    assert added["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "0"  # else 60 s before the abort
    assert added["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"


def test_nccl_variables_have_the_names_and_values_of_this_torch() -> None:
    source = HEADER.read_text()
    for name in nccl_environment.VALUES:
        if name.startswith("TORCH_"):
            assert f'"{name}"' in source, name
    assert "CleanUpOnly = 2" in source


def test_own_nccl_values_are_respected_or_rejected_by_name() -> None:
    own = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    assert not own.keys() & complete_nccl_environment(own).keys()
    dump = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "NCCL_LAUNCH_ORDER_IMPLICIT": "0"}
    added = complete_nccl_environment(dump)
    assert not {*dump, "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"} & added.keys()
    for handling, reason in (("0", "never end"), ("1", "watchdog"), ("3", "watchdog")):
        with pytest.raises(ConfigError, match=reason) as rejected:
            complete_nccl_environment({"TORCH_NCCL_ASYNC_ERROR_HANDLING": handling})
        assert rejected.value.where == "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def test_only_collective_errors_indicate_a_lost_rank() -> None:
    for error in (
        RuntimeError("[/x/gloo/transport/tcp/pair.cc:553] Connection closed"),
        dist.DistBackendError("NCCL communicator was aborted on rank 1."),
        RuntimeError("NCCL Error 6: remote process exited or there was a network error"),
    ):
        assert is_collective_error(error), error
    assert not is_collective_error(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))


def make_group(error: ErrorType | None) -> Any:
    def get_backend(device: torch.device) -> Any:
        assert device.type == "cuda"
        if error is None:
            raise RuntimeError("No backend type associated with device type cuda")
        return SimpleNamespace(get_error=lambda: error)

    return SimpleNamespace(_get_backend=get_backend)


def test_failure_that_the_watchdog_found_is_reported() -> None:
    sound = [make_group(None), make_group(ErrorType.SUCCESS)]
    assert find_group_failure(sound) == ""
    assert "TIMEOUT" in find_group_failure([*sound, make_group(ErrorType.TIMEOUT)])
    assert find_group_failure() == ""  # no group of this process


@pytest.mark.parametrize("error", [None, IndexError("garbage"), RuntimeError("wrong size")])
async def test_work_whose_group_was_aborted_loses_the_rank(error: Exception | None) -> None:
    """Lose the rank although the host continues after an abort, with undefined results."""
    thread, _ = make_thread()
    begun, aborted = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        assert aborted.wait(scaled(20.0))
        if error is not None:
            raise error
        return "a sum of something"

    running = asyncio.create_task(thread.run(work, deadline_s=scaled(20.0)))
    assert await asyncio.to_thread(begun.wait, scaled(20.0))
    await thread.leave(aborted.set)
    with pytest.raises(RankLost, match="left"):
        await running
    assert await thread.run(lambda: "next", deadline_s=scaled(20.0)) == "next"


async def test_process_with_a_gpu_error_exits() -> None:
    thread, exits = make_thread()

    def work() -> None:
        raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")

    with pytest.raises(SystemError):
        await thread.run(work, deadline_s=scaled(20.0))
    assert exits == [GPU_ERROR_EXIT_STATUS]


async def test_process_whose_groups_cannot_be_aborted_exits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("meshrl.services.trainer.ranks.rank_thread.LEAVE_TIMEOUT_S", 0.01)
    thread, exits = make_thread()
    released = threading.Event()

    def leave() -> None:
        released.wait(scaled(20.0))

    with pytest.raises(SystemError):
        await thread.leave(leave)
    released.set()
    assert len(exits) == 1


def test_absent_rank_is_named_within_the_forming_deadline(tmp_path: Path) -> None:
    began = time.monotonic()
    meeting = Rendezvous(1, str(tmp_path / "meeting"), 3600.0, form_timeout_s=0.3)
    with pytest.raises(RankLost, match=r"group of 3 ranks within 0.3 s: rank 1, 2 has not come"):
        join_group(meeting, 0, 3, "cpu")
    assert time.monotonic() - began < scaled(30.0)
    assert not dist.is_initialized()
