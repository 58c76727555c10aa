"""Environment variables that have new names."""

from __future__ import annotations

from meshrl.__main__ import replace_old_variables


def test_old_variables_set_the_new_ones_with_a_notice() -> None:
    environ = {"MESHRL_NURSERY": "off", "MESHRL_STAND_FOR": "T4", "HOME": "/root"}
    assert replace_old_variables(environ) == [
        "$MESHRL_NURSERY is deprecated: set $MESHRL_FORK_SERVER",
        "$MESHRL_STAND_FOR is deprecated: set $MESHRL_EMULATED_ACCELERATORS",
    ]
    expected = {"MESHRL_FORK_SERVER": "off", "MESHRL_EMULATED_ACCELERATORS": "T4"}
    assert environ == expected | {"HOME": "/root"}


def test_new_variable_has_precedence_over_its_old_name() -> None:
    environ = {"MESHRL_NURSERY": "off", "MESHRL_FORK_SERVER": "/run/fork"}
    replace_old_variables(environ)
    assert environ == {"MESHRL_FORK_SERVER": "/run/fork"}
