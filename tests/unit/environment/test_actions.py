"""Environments: creation, checks of their answers, and execution in threads."""

from __future__ import annotations

import errno
import math
import re
import socket
import threading
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from meshrl.common.base.errors import ConfigError, DeadlineExceeded
from meshrl.common.environment.creation_errors import convert_creation_errors
from meshrl.common.environment.reward_numbers import (
    average_valid_metrics,
    parse_reward,
    split_reward,
    to_finite_float,
)
from meshrl.common.mesh.process.diagnosis.failure import Failure
from meshrl.common.mesh.process.entry.child import ChildChannel
from meshrl.services.environment import threaded_server
from meshrl.services.environment.answers import EnvironmentAnswer, InvalidAnswer, call_environment
from meshrl.services.environment.environments import Environments
from meshrl.services.sandbox.workers.worker import BAD_VALUE, GROUP_REWARD, OK, REWARD, run_call
from meshrl.sim.mesh.job.job_setup import CHARACTERS
from tests.load import scaled
from tests.unit.common.model.chatting import qwen3_tokenizer

VALID_ANSWERS: list[tuple[Any, EnvironmentAnswer]] = [
    ({"tool": "look", "input": {"at": 1}}, EnvironmentAnswer("look", {"at": 1})),
    ({"tool": "look"}, EnvironmentAnswer("look")),
    ({"tool": "look", "input": None, "done": False, "reward": None}, EnvironmentAnswer("look")),
    ({"append": "so?"}, EnvironmentAnswer(append="so?")),
    ({"append": "so?", "done": False}, EnvironmentAnswer(append="so?")),
    ({"append": [], "done": True}, EnvironmentAnswer(done=True)),
    ({"append": "", "done": True, "reward": 1}, EnvironmentAnswer(done=True, reward=1.0)),
    ({"done": True}, EnvironmentAnswer(done=True)),
    ({"done": np.True_, "reward": None}, EnvironmentAnswer(done=True)),
    ({"done": True, "reward": 1}, EnvironmentAnswer(done=True, reward=1.0)),
    ({"done": True, "reward": True}, EnvironmentAnswer(done=True, reward=1.0)),
    ({"done": True, "reward": np.float32(0.5)}, EnvironmentAnswer(done=True, reward=0.5)),
    ({"append": "over", "done": True}, EnvironmentAnswer(append="over", done=True)),
    (
        {"append": "over", "done": True, "reward": 0.5},
        EnvironmentAnswer("", None, "over", True, 0.5),
    ),
]
INVALID_ANSWERS: list[tuple[Any, str]] = [
    (None, "step() returned None: an environment returns {'tool'"),
    ("done", "returned 'done': an environment returns"),
    (({"done": True},), "an environment returns"),
    ({}, "the answer lacks 'tool', 'append' and 'done'"),
    ({"done": False}, "the answer lacks 'tool', 'append' and 'done'"),
    ({"append": None}, "the answer lacks 'tool', 'append' and 'done'"),
    ({"done": 1}, "'done' must be True or False, not 1"),
    ({"done": "yes"}, "'done' must be True or False, not 'yes'"),
    ({"tool": "look", "done": True}, "'tool' allows only 'input', not 'done'"),
    ({"tool": "look", "append": "x"}, "'tool' allows only 'input', not 'append'"),
    ({"tool": "look", "reward": 0.0}, "'tool' allows only 'input', not 'reward'"),
    ({"tool": 5}, "'tool' must be the name of a tool, not 5"),
    ({"tool": ""}, "'tool' must be the name of a tool, not ''"),
    ({"input": 1, "append": "x"}, "'input' requires 'tool'"),
    ({"append": "x", "reward": 1.0}, "'reward' requires 'done': True"),
    ({"append": "x", "done": False, "reward": 0.0}, "'reward' requires 'done': True"),
    ({"reward": 1.0}, "'reward' requires 'done': True"),
    ({"done": True, "rewrad": 1.0}, "there is no key 'rewrad'"),
    ({"done": True, "reward": "1.0"}, "'reward' must be a finite number, not '1.0', a str"),
    ({"done": True, "reward": [1.0]}, "'reward' must be a finite number, not [1.0], a list"),
    ({"done": True, "reward": math.nan}, "'reward' must be finite, not nan"),
    ({"done": True, "reward": -math.inf}, "'reward' must be finite, not -inf"),
    ({"done": True, "reward": 10**400}, "'reward' must be finite"),
    ({"done": True, "reward": 1j}, "'reward' must be a finite number, not 1j"),
    ({"append": "x", "metrics": {"a": 1}}, "'metrics' requires 'done': True"),
    ({"done": True, "metrics": [1]}, "'metrics' must be a dict of numbers by name, not [1]"),
]
INVALID_REWARDS: list[tuple[Any, str]] = [
    ({}, "the key 'reward' is missing"),
    ({"metrics": {"a": 1}}, "the key 'reward' is missing"),
    ({"reward": 1, "metric": {}}, "there is no key 'metric'"),
    ({"reward": None}, "'reward' must be a finite number, not None"),
    ({"reward": 1, "metrics": {"a": "1"}}, "metric 'a' must be a finite number, not '1', a str"),
    ({"reward": 1, "metrics": {"a": math.nan}}, "metric 'a' must be finite, not nan"),
    ({"reward": 1, "metrics": {"a b": 1}}, "the name of a metric must be"),
    ({"reward": 1, "metrics": {"a/b": 1}}, "the name of a metric must be"),
    ({"reward": 1, "metrics": {5: 1}}, "the name of a metric must be"),
    ({"reward": 1, "metrics": {"": 1}}, "the name of a metric must be"),
    ({"reward": 1, "metrics": {f"a{i}": 1 for i in range(33)}}, "has 33 names; the limit is 32"),
]


def test_metrics_are_parsed_beside_a_reward() -> None:
    metrics = {"steps": np.int64(3), "solved.first": True}
    found = {"reward": 0.5, "metrics": {"steps": 3.0, "solved.first": 1.0}}
    assert parse_reward({"reward": 0.5, "metrics": metrics}) == found
    assert parse_reward({"reward": 1, "metrics": {}}) == parse_reward({"reward": 1}) == 1.0
    answered = {"done": True, "reward": 0.5, "metrics": metrics}
    assert call_environment(lambda text: answered, "x").reward == found
    left = call_environment(lambda text: {"done": True, "metrics": metrics}, "x").reward
    assert split_reward(left) == (None, found["metrics"])


def test_metrics_of_a_library_are_averaged_without_invalid_ones() -> None:
    tables: list[dict[str, Any]] = [
        {"turns": 2, "a": None, "a b": 1.0, "b": math.nan},
        {"turns": 4.0, "c": True},
    ]
    assert average_valid_metrics(tables) == {"c": 1.0, "turns": 3.0}
    assert len(average_valid_metrics([{f"m{i}": i for i in range(40)}])) == 32


@pytest.mark.parametrize(("value", "error"), INVALID_REWARDS)
def test_invalid_metrics_are_rejected_by_name(value: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(error)):
        parse_reward(value)
    answered = run_call({f"{REWARD}0": lambda: value}, [1, f"{REWARD}0", msgpack.packb([])])
    assert answered[1] == BAD_VALUE and error in answered[3], answered


def test_valid_answers_are_parsed() -> None:
    for value, expected in VALID_ANSWERS:
        assert call_environment(lambda text, value=value: value, "x") == expected, value


def test_contradictory_answers_are_rejected_by_name() -> None:
    for value, expected_error in INVALID_ANSWERS:

        def step(text: str, value: Any = value) -> Any:
            return value

        with pytest.raises(InvalidAnswer) as caught:
            call_environment(step, "x")
        assert expected_error in str(caught.value), value


def test_finite_numbers_of_any_type_are_accepted() -> None:
    for value in (1, True, 0.5, np.int64(2), np.float16(1), Fraction(1, 2), 1e300):
        assert to_finite_float(value, "it") == float(value)
    others: list[Any] = ["1", None, np.True_, [], Decimal(1), 1j, np.zeros(1)]
    for other in others:
        with pytest.raises(TypeError, match="it must be a finite number"):
            to_finite_float(other, "it")


class FixedAnswer:
    """Environment that returns the class's `answer`; this file counts as the author's code."""

    answer: Any = None

    def open(self, row: dict[str, Any]) -> Any:
        return row["prompt"]

    def step(self, text: str) -> Any:
        return self.answer

    def cut(self, text: str) -> Any:
        return "0.5"

    def close(self) -> None:
        return None


def test_invalid_answer_names_the_line_of_the_authors_function(tmp_path: Path) -> None:
    served = Environments(
        FixedAnswer, qwen3_tokenizer(tmp_path), "", modules=str(Path(__file__).parent)
    )
    answers = [
        served.run_operation(1, "begin", {"prompt": 5}),
        served.run_operation(1, "begin", {"prompt": "hi"}),
        served.run_operation(1, "step", [5]),
        served.run_operation(1, "cut", [5]),
    ]
    assert [status for status, _ in answers] == ["raised", "ok", "raised", "raised"]
    for at, method in ((0, "open"), (2, "step"), (3, "cut")):
        text = answers[at][1]
        assert text.startswith(f"{method}() returned") and f" in {method}())" in text
        assert " (test_actions.py:" in text


def test_last_observation_is_returned_with_the_end(tmp_path: Path) -> None:
    tokenizer = qwen3_tokenizer(tmp_path)
    served = Environments(FixedAnswer, tokenizer, "")
    served.run_operation(1, "begin", {"prompt": "hi"})
    FixedAnswer.answer = {"append": " over", "done": True, "reward": 0.5}
    status, (_, action, (ids, score)) = served.run_operation(1, "step", tokenizer.encode("x"))
    assert (status, action, tokenizer.decode(ids), score) == ("ok", "last", " over", 0.5)


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
def test_code_errors_fail_the_job_and_name_their_line(error: Exception) -> None:
    with (
        pytest.raises(ConfigError, match="cannot be created") as error_info,
        convert_creation_errors(),
    ):
        raise error
    assert "test_actions.py:" in error_info.value.where
    assert Failure.from_error(error_info.value).restart == "never"


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
def test_transient_errors_are_not_converted(error: Exception, restart: str) -> None:
    with pytest.raises(type(error)) as error_info, convert_creation_errors():
        raise error
    assert error_info.value is error
    assert Failure.from_error(error).restart == restart


WITHIN_S = 30.0  # for immediate answers


class GatedEnvironment:
    """Environment whose turn ends when the gate of its row opens."""

    gates: dict[str, threading.Event]

    def open(self, row: dict[str, Any]) -> str:
        self._gate = self.gates.setdefault(row["gate"], threading.Event())
        return str(row["prompt"])

    def step(self, text: str) -> dict[str, Any]:
        if not self._gate.wait(scaled(WITHIN_S)):
            raise TimeoutError("nobody opened the gate")
        return {"done": True, "reward": len(text)}

    def close(self) -> None:
        return None


class ShardStream:
    """Shard's end of the stream to an environment process."""

    def __init__(self, stream: socket.socket) -> None:
        self._channel = ChildChannel(stream)
        self._stream = stream

    def send_operations(self, *operations: list[Any]) -> None:
        self._channel.send(msgpack.packb(list(operations)))

    def receive_answers(self) -> list[list[Any]]:
        block = self._channel.recv()
        assert block is not None
        error_info: list[list[Any]] = msgpack.unpackb(block)
        return error_info

    def end(self) -> None:
        self._stream.shutdown(socket.SHUT_WR)


@pytest.fixture
def gates() -> Iterator[dict[str, threading.Event]]:
    GatedEnvironment.gates = {}
    yield GatedEnvironment.gates
    for gate in GatedEnvironment.gates.values():
        gate.set()


@pytest.fixture
def shard_stream(tmp_path: Any, gates: dict[str, threading.Event]) -> Iterator[ShardStream]:
    from meshrl.common.model.tokens.tokenizer import Tokenizer, build_character_tokenizer

    build_character_tokenizer(CHARACTERS, str(tmp_path / "tokenizer.json"))
    served = Environments(
        GatedEnvironment, Tokenizer.load(str(tmp_path / "tokenizer.json")), "prompt"
    )
    shard_socket, process_socket = socket.socketpair()
    shard_socket.settimeout(scaled(WITHIN_S))
    serving = threading.Thread(
        target=threaded_server.serve_threaded,
        args=(ChildChannel(process_socket), served.run_operation, 4),
    )
    serving.start()
    shard_stream = ShardStream(shard_socket)
    yield shard_stream
    for gate in gates.values():
        gate.set()
    shard_stream.end()
    serving.join(scaled(WITHIN_S))
    assert not serving.is_alive()
    shard_socket.close()
    process_socket.close()


def begin(number: int, key: int, gate: str) -> list[Any]:
    return [number, key, "begin", {"prompt": "a", "gate": gate}]


def test_waiting_trajectory_does_not_block_others(
    shard_stream: ShardStream, gates: dict[str, threading.Event]
) -> None:
    shard_stream.send_operations(begin(1, 1, "shut"))
    shard_stream.send_operations(begin(2, 2, "open"))
    assert sorted(answer[:2] for _ in range(2) for answer in shard_stream.receive_answers()) == [
        [1, "ok"],
        [2, "ok"],
    ]
    gates["open"].set()
    shard_stream.send_operations([3, 1, "step", [3, 4]], [4, 2, "step", [3]])
    [[number, status, action]] = shard_stream.receive_answers()
    assert (number, status, action[1:]) == (4, "ok", ["done", 1.0])
    gates["shut"].set()
    [[number, status, action]] = shard_stream.receive_answers()
    assert (number, status, action[1:]) == (3, "ok", ["done", 2.0])


def test_process_with_busy_threads_answers_liveness_checks(
    shard_stream: ShardStream, gates: dict[str, threading.Event]
) -> None:
    shard_stream.send_operations(*(begin(key, key, "shut") for key in range(1, 6)))
    for _ in range(5):
        shard_stream.receive_answers()
    shard_stream.send_operations(*([10 + key, key, "step", [3]] for key in range(1, 6)))
    shard_stream.send_operations([0, 0, threaded_server.LIVENESS_OPERATION, []])
    assert shard_stream.receive_answers() == [[0, "ok", ""]]


def test_environment_error_fails_only_its_trajectory(shard_stream: ShardStream) -> None:
    shard_stream.send_operations([1, 1, "begin", {"prompt": "a"}])
    [[number, status, error_text]] = shard_stream.receive_answers()
    assert (number, status) == (1, "raised") and "KeyError: 'gate'" in error_text


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (0.5, "returned 0.5, a float; with reward.over_group, a reward is a list of 2 numbers"),
        ([1.0], "returned [1.0], 1 of them; with reward.over_group, a reward is a list of 2"),
        ([1.0, None], "returned at place 1 of its list None, a NoneType; a reward is a finite"),
        ([1.0, {"reward": 2, "metrics": {"a": "x"}}], "metric 'a' must be a finite number"),
    ],
)
def test_invalid_rewards_of_a_group_are_rejected(value: Any, error: str) -> None:
    name, arguments = f"{GROUP_REWARD}0", msgpack.packb([{}, [[], []]])
    answered = run_call({name: lambda row, group: value}, [1, name, arguments])
    assert answered[1] == BAD_VALUE and error in answered[3], answered


def test_rewards_of_a_group_may_have_metrics() -> None:
    name, arguments = f"{GROUP_REWARD}0", msgpack.packb([{}, [[], []]])
    measured = {"reward": 1, "metrics": {"rank": np.int64(2)}}
    answered = run_call({name: lambda row, group: (True, measured)}, [1, name, arguments])
    assert answered[1:3] == (OK, [1.0, {"reward": 1.0, "metrics": {"rank": 2.0}}])
