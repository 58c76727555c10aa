"""An environment that cannot be made ends its job at once only where no start would go better."""

from __future__ import annotations

import errno

import pytest

from meshrl.common.base.errors import ConfigError, DeadlineExceeded
from meshrl.common.environment.making import making
from meshrl.common.mesh.process.ends.failure import Failure


def with_cause(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        ImportError("no module"),
        SyntaxError("odd"),
        AttributeError("no factory"),
        KeyError("rows"),
        ConfigError("no such format"),
        with_cause(ValueError("no board"), KeyError("board")),
    ],
)
def test_mistakes_in_code_end_the_job_and_name_their_place(error: Exception) -> None:
    with pytest.raises(ConfigError, match="cannot be made") as found, making():
        raise error
    assert "test_making.py:" in found.value.where
    assert Failure.of(found.value).restart == "never"


@pytest.mark.parametrize(
    ("error", "restart"),
    [
        (OSError(errno.ENOSPC, "no room"), "always"),
        (OSError(errno.ENOMEM, "no memory"), "counted"),
        (MemoryError(), "counted"),
        (TimeoutError(), "counted"),
        (RuntimeError("the server is slow"), "counted"),
        (DeadlineExceeded("slow"), "patient"),
        (with_cause(ValueError("no rows"), ConnectionError("refused")), "counted"),
    ],
)
def test_what_may_pass_is_left_as_it_is(error: Exception, restart: str) -> None:
    with pytest.raises(type(error)) as found, making():
        raise error
    assert found.value is error
    assert Failure.of(error).restart == restart
