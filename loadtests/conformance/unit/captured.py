"""What a test captures: output, logs and warnings; mocks."""

from __future__ import annotations

from loadtests.conformance.row import unit

ROWS = [
    unit(
        "logged",
        """
import logging

log = logging.getLogger("jobs")


def process(jobs):
    done = 0
    for name, action in jobs:
        try:
            action()
        except Exception as error:
            log.warning("job %s failed: %s", name, error)
        else:
            done += 1
            log.debug("job %s done", name)
    log.info("%d of %d", done, len(jobs))
    return done
""",
        """
import logging

from solution import process


def bad():
    raise RuntimeError("oops")


def test_failures_are_logged(caplog):
    with caplog.at_level(logging.INFO, logger="jobs"):
        assert process([("a", bad), ("b", lambda: None)]) == 1
    assert [r.getMessage() for r in caplog.records] == ["job a failed: oops", "1 of 2"]
    assert caplog.records[0].levelname == "WARNING"


def test_none(caplog):
    caplog.set_level(logging.DEBUG)
    assert process([]) == 0
    assert "0 of 0" in caplog.text
""",
        ("log.warning(", "log.info("),
        (
            "done += 1\n            log",
            "done = 1 + done\n            log",
            'log.info("%d of %d", done, len(jobs))',
            'log.info("%d of %d", done, len(jobs) or 1)',
        ),
    ),
    unit(
        "deprecated",
        """
import warnings


def area(width, height=None, *, h=None):
    if h is not None:
        warnings.warn("h is deprecated, use height", DeprecationWarning, stacklevel=2)
        height = h
    if height is None:
        height = width
    if width < 0 or height < 0:
        warnings.warn("negative side", RuntimeWarning, stacklevel=2)
        return 0
    return width * height
""",
        """
import warnings

import pytest
from solution import area


def test_warns():
    with pytest.warns(DeprecationWarning, match="use height"):
        assert area(2, h=5) == 10
        assert area(2, h=0) == 0


def test_quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert area(2, 3) == 6
        assert area(4) == 16
        assert area(4, 0) == 0


def test_negative():
    with pytest.warns(RuntimeWarning):
        assert area(-1, 2) == 0
""",
        ("if h is not None", "if h"),
        ("if height is None:", "if not height:"),
    ),
    unit(
        "mocked_client",
        """
class Sync:
    def __init__(self, client, limit=3):
        self.client, self.limit = client, limit

    def push(self, items):
        sent = 0
        for item in items:
            for attempt in range(self.limit):
                try:
                    self.client.send(item, attempt=attempt)
                except ConnectionError:
                    continue
                sent += 1
                break
        self.client.flush()
        return sent
""",
        """
from unittest.mock import Mock, call

import pytest
from solution import Sync


def test_sends_all():
    client = Mock()
    assert Sync(client).push(["a", "b"]) == 2
    assert client.send.call_args_list == [call("a", attempt=0), call("b", attempt=0)]
    client.flush.assert_called_once_with()


def test_tries_again():
    client = Mock()
    client.send.side_effect = [ConnectionError, None]
    assert Sync(client).push(["a"]) == 1
    assert client.send.call_count == 2


def test_gives_up():
    client = Mock()
    client.send.side_effect = ConnectionError("down")
    assert Sync(client, limit=2).push(["a"]) == 0
    assert client.send.call_count == 2


def test_other_errors_pass():
    client = Mock()
    client.send.side_effect = ValueError
    with pytest.raises(ValueError):
        Sync(client).push([1])
    client.flush.assert_not_called()
""",
        ("except ConnectionError:", "except Exception:"),
        ("                break\n", ""),
    ),
    unit(
        "patch_decorator",
        """
import json
from pathlib import Path


def read_settings(path):
    return json.loads(Path(path).read_text())


def merged(path, defaults):
    try:
        found = read_settings(path)
    except FileNotFoundError:
        found = {}
    return {**defaults, **{k: v for k, v in found.items() if v is not None}}
""",
        """
from unittest.mock import patch

from solution import merged


@patch("solution.read_settings")
def test_merges(read):
    read.return_value = {"a": 2, "b": None, "c": 0}
    assert merged("x", {"a": 1, "b": 1}) == {"a": 2, "b": 1, "c": 0}
    read.assert_called_once_with("x")


def test_missing():
    with patch("solution.read_settings", side_effect=FileNotFoundError):
        assert merged("x", {"a": 1}) == {"a": 1}


def test_defaults_stay():
    defaults = {"a": 1}
    with patch("solution.read_settings", return_value={"a": 5}):
        merged("y", defaults)
    assert defaults == {"a": 1}
""",
        ("if v is not None", "if v"),
        (
            "found = {}",
            "return None",
        ),
    ),
    unit(
        "mock_callback",
        """
class Emitter:
    def __init__(self):
        self._handlers = {}

    def on(self, event, handler):
        self._handlers.setdefault(event, []).append(handler)
        return lambda: self._handlers[event].remove(handler)

    def emit(self, event, *args, **kwargs):
        handlers = list(self._handlers.get(event, ()))
        for handler in handlers:
            handler(*args, **kwargs)
        return len(handlers)
""",
        """
from unittest.mock import MagicMock

from solution import Emitter


def test_calls_with_arguments():
    emitter, handler = Emitter(), MagicMock()
    emitter.on("saved", handler)
    assert emitter.emit("saved", 1, key="k") == 1
    handler.assert_called_once_with(1, key="k")


def test_off():
    emitter, handler = Emitter(), MagicMock()
    off = emitter.on("saved", handler)
    off()
    assert emitter.emit("saved") == 0
    assert not handler.called


def test_may_leave_while_called():
    emitter = Emitter()
    seen = []

    def once():
        seen.append("once")
        off()

    off = emitter.on("x", once)
    emitter.on("x", lambda: seen.append("always"))
    emitter.emit("x")
    emitter.emit("x")
    assert seen == ["once", "always", "always"]
""",
        ("list(self._handlers.get(event, ()))", "self._handlers.get(event, ())"),
        ("handler(*args, **kwargs)", "handler(*args)"),
    ),
]
