"""What `meshrl up` and `meshrl join` make of the options that say what a host gives."""

from __future__ import annotations

import pytest

from meshrl.common.base.errors import ConfigError
from meshrl.common.state.pool.placing.taking import ALL, taken, written
from meshrl.launch.roles import HostRole, role
from meshrl.launch.services.plan import agent
from meshrl.services.node.__main__ import parser


def test_a_host_gives_workers_and_takes_all_services_unless_it_says_otherwise() -> None:
    assert role(0, "cpu", False, None, 3) == HostRole(3, "cpu", ("shards", "sandboxes"))
    assert role(0, "cuda", False, "shards", 3) == HostRole(0, "cuda", ("shards",))
    assert role(0, "cpu", True, "sandboxes,shards", 3) == HostRole(
        0, "cpu", ("shards", "sandboxes")
    )
    assert role(1, "cpu", False, "none") == HostRole(1, "cpu", ())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((0, "cpu", True, "none", 3), "neither workers nor services"),
        ((0, "cpu", False, "none", 0), "neither workers nor services"),
        ((0, "cuda", True, None, 3), "has no device"),
        ((4, "cpu", True, None, 3), "--no-workers with --workers 4"),
        ((1, "cpu", False, "shards,engines", 3), "'engines' is no service"),
        ((1, "cpu", False, "", 3), "'' is no service"),
    ],
)
def test_options_that_contradict_each_other_or_leave_nothing_to_give_are_refused(
    given: tuple[int, str, bool, str | None, int], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        role(*given)


@pytest.mark.parametrize("takes", [(), ("shards",), ALL])
def test_an_agent_is_told_what_its_host_takes(takes: tuple[str, ...]) -> None:
    told = agent("here", 0, "cpu", takes).argv[3:]
    assert parser().parse_args(told).services == takes == taken(written(takes))
