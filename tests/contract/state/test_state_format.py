"""Format of the state in Redis, and states of other versions."""

from __future__ import annotations

import pytest

from meshrl.common.base.errors import ConfigError
from meshrl.common.state.server_state.rollback import TOKEN_KEY
from meshrl.common.state.server_state.state_format import (
    FORMAT_KEY,
    STATE_FORMAT,
    require_state_format,
    write_state_format,
)
from tests.contract.state.state_bench import Bench


async def test_empty_redis_is_accepted(bench: Bench) -> None:
    await require_state_format(bench.state)


async def test_state_of_this_version_is_accepted(bench: Bench) -> None:
    await write_state_format(bench.state)
    await bench.state.run_command("SET", TOKEN_KEY, 1)
    await require_state_format(bench.state)


@pytest.mark.parametrize("number", [None, STATE_FORMAT - 1, STATE_FORMAT + 1])
async def test_state_of_another_version_is_rejected_by_its_format(
    bench: Bench, number: int | None
) -> None:
    await bench.state.run_command("SET", TOKEN_KEY, 1)
    if number is not None:
        await bench.state.run_command("SET", FORMAT_KEY, number)
    with pytest.raises(ConfigError, match=f"its format is {number or 1}") as caught:
        await require_state_format(bench.state)
    assert "finish its jobs or to export their weights" in caught.value.fix
    assert await bench.state.run_command("GET", TOKEN_KEY) == "1"  # nothing has changed
