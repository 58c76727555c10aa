"""What every script must be, whatever it does."""

from __future__ import annotations

import re

import pytest

from meshrl.common.state.redis.client import SCRIPTS, script_file, script_source

NAMES = sorted(path.stem for path in SCRIPTS.glob("*/*.lua"))
SENT = [name for name in NAMES if not name.startswith("_") and name != "prelude"]


def test_a_script_is_found_by_its_name_alone_wherever_it_lies() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert {script_file(name) for name in NAMES} == set(SCRIPTS.rglob("*.lua"))


@pytest.mark.parametrize("name", NAMES)
def test_a_script_says_why_it_exists_and_sets_no_globals(name: str) -> None:
    source = script_file(name).read_text()
    lines = [line for line in source.splitlines() if not line.startswith("-- uses:")]
    assert lines[0].startswith("-- ")
    assert not re.search(r"^\s*function \w", source, re.MULTILINE)
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("name", SENT)
def test_a_script_is_sent_with_the_prelude_and_what_it_uses(name: str) -> None:
    source, sha = script_source(name)
    assert source.startswith(f"local SCRIPT = '{name}'") and len(sha) == 40
    for fragment in re.findall(r"-- uses: (.+)", source):
        for part in fragment.split():
            assert script_file(f"_{part}").read_text() in source


def test_scripts_that_write_and_are_not_idempotent_by_nature_replay_by_operation() -> None:
    replaying = {name for name in SENT if "replayed()" in script_file(name).read_text()}
    assert {"admit", "group_ready", "group_returned", "write", "open_lineage"} <= replaying
    assert {"submit", "append", "request"} <= replaying
