"""What ended a process is found by whoever started it, however it was started and has ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import (
    ConfigError,
    DeadlineExceeded,
    Fenced,
    NotFound,
    PeerLost,
    RankLost,
    StateUnavailable,
    StorageFull,
    ToolFailed,
)
from meshrl.common.mesh.process.ends.failure import Failure, told
from meshrl.common.mesh.process.handle import SystemChild
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.process.supervision.supervisor import ChildSpec, Supervisor
from tests.load import scaled
from tests.unit.common.mesh.process.modules import module, python
from tests.unit.common.mesh.process.test_supervisor import Recorded, eventually

CODES = {
    "imports": ("import no_such_module", "ModuleNotFoundError", "No module named 'no_such_module'"),
    "raises": ("def f():\n    [][3]\n\nf()", "IndexError", "list index out of range"),
    "says": ("import sys; sys.exit('it has no address')", "SystemExit", "it has no address"),
    "refuses": (
        "from meshrl.common.base.errors import ConfigError\n"
        "raise ConfigError('no such token', where='rollout.stop', fix='name one')",
        "ConfigError",
        "no such token",
    ),
    "exits": (
        "from meshrl.common.base.errors import PeerLost\n"
        "from meshrl.common.mesh.process.host import SystemHost\n"
        "SystemHost().exit(70, 'so it ends', PeerLost('it went'), 'calc')",
        "PeerLost",
        "it went",
    ),
}


async def left(tmp_path: Path, name: str, code: str) -> Failure | None:
    """What a process leaves that runs this code."""
    log = tmp_path / f"{name}.log"
    host = SystemHost()
    child = host.spawn(python(name), name=name, env=module(tmp_path, name, code), log=log)
    assert await child.wait(scaled(20)) not in (0, None), log.read_text()
    return host.failure_of(child.pid, log)


@pytest.mark.parametrize("forked", [False, True])
async def test_an_error_is_found_with_its_type_text_and_place(
    tmp_path: Path, open_nursery: Callable[..., SystemChild], forked: bool
) -> None:
    if forked:
        open_nursery()
    for name, (code, kind, text) in CODES.items():
        failure = await left(tmp_path, name, code)
        assert failure is not None, name
        assert (failure.type, failure.text) == (kind, text)
        if name == "raises":
            assert failure.where == f"{tmp_path / 'raises.py'}:2"
        if name == "refuses":
            assert (failure.where, failure.fix, failure.fatal) == ("rollout.stop", "name one", True)
        if name == "exits":
            assert (failure.job, failure.restart) == ("calc", "patient")


async def test_what_an_earlier_process_left_is_not_blamed_on_a_later_one(tmp_path: Path) -> None:
    assert await left(tmp_path, "twice", "import no_such_module") is not None
    assert await left(tmp_path, "twice", "import os; os._exit(3)") is None


@pytest.mark.parametrize(
    ("error", "restart"),
    [
        (ConfigError("x"), "never"),
        (ToolFailed("x"), "never"),
        (ValueError("x"), "counted"),
        (NotFound("x"), "counted"),
        (PeerLost("x"), "patient"),
        (DeadlineExceeded("x"), "patient"),
        (StorageFull("x"), "always"),
        (StateUnavailable("x"), "always"),
        (Fenced("x"), "patient"),
        (RankLost("x"), "patient"),
        (OSError(28, "No space left on device"), "always"),
        (OSError(13, "Permission denied"), "counted"),
    ],
)
def test_only_an_error_of_ones_own_counts_against_a_job(error: Exception, restart: str) -> None:
    assert Failure.of(error).restart == restart


def test_the_text_of_a_failure_says_what_where_and_what_to_do() -> None:
    failure = Failure.of(ConfigError("no such token", where="rollout.stop", fix="name one"))
    assert str(failure) == "ConfigError: no such token (at rollout.stop). name one"
    assert told(failure.fields()) == str(failure)
    assert told({}) == ""


async def test_a_child_that_would_only_fail_again_is_given_up_at_once_with_its_error(
    tmp_path: Path,
) -> None:
    code = "from meshrl.common.base.errors import ConfigError\nraise ConfigError('no', fix='do')"
    hooks = Recorded()
    env = module(tmp_path, "wrong", code)
    spec = ChildSpec("w", python("wrong"), env=env, log=tmp_path / "w.log", critical=True)
    supervisor = Supervisor(SystemHost(), SystemClock(), [spec], hooks=hooks)
    await supervisor.start()
    await eventually(lambda: ("escalated", "w") in hooks.seen)
    assert [kind for kind, _ in hooks.seen] == ["started", "ended", "gave up", "escalated"]
    (end,) = hooks.ends
    assert end.final and end.failure is not None and end.failure.text == "no"
    assert hooks.whys[-1].startswith("ConfigError: no (at ") and hooks.whys[-1].endswith("do")


async def test_a_spent_budget_names_the_error(tmp_path: Path) -> None:
    hooks = Recorded()
    env = module(tmp_path, "crashes", "raise ValueError('of this')")
    log = tmp_path / "c.log"
    spec = ChildSpec("c", python("crashes"), env=env, log=log, budget=(1, 60.0))
    supervisor = Supervisor(SystemHost(), SystemClock(), [spec], hooks=hooks)
    await supervisor.start()
    await eventually(lambda: ("gave up", "c") in hooks.seen)
    assert "ValueError: of this" in hooks.whys[-1] and "more than 1 times" in hooks.whys[-1]
    assert [end.restarts for end in hooks.ends] == [0, 1]
