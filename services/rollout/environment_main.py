"""An environment process: runs the job author's environment code, and owns the tokenizer.

It decodes what the model sampled for `step` and encodes only what the environment appends. One
frame in, one frame out: a list of [key, operation, argument] answered by a list of [key, status,
value].
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from typing import Any

import msgpack

from common.child import Channel
from common.model.tokenizer import Tokenizer

Answer = tuple[str, Any]


class Environments:
    """The open environments of one process, by trajectory."""

    def __init__(
        self, factory: Callable[[], Any] | None, tokenizer: Tokenizer, prompt: str
    ) -> None:
        self._factory = factory or SingleTurn.factory(prompt)
        self._tokenizer = tokenizer
        self._open: dict[int, Any] = {}

    def perform(self, key: int, operation: str, argument: Any) -> Answer:
        """One operation; what the author's code raises becomes the status `raised`."""
        try:
            answer = getattr(self, "_" + operation)(key, argument)
            msgpack.packb(answer, use_bin_type=True)  # what cannot travel is the author's to know
            return "ok", answer
        except KeyError as error:
            if error.args == (key,):
                return "unknown", f"trajectory {key} has no environment here"
            return "raised", f"KeyError: {error}"
        except Exception as error:
            return "raised", f"{type(error).__name__}: {error}"

    def _begin(self, key: int, row: dict[str, Any]) -> list[int]:
        environment = self._factory()
        text = environment.open(row)
        if not isinstance(text, str):
            raise TypeError(f"open() returned {type(text).__name__}, not the prompt as str")
        self._open[key] = environment
        return self._tokenizer.encode(text)

    def _step(self, key: int, ids: list[int]) -> Any:
        environment = self._open[key]
        text = self._tokenizer.decode(ids)
        return [text, *self._action(environment.step(text), tools=True)]

    def _result(self, key: int, value: Any) -> Any:
        return self._action(self._open[key].result(value), tools=False)

    def _text(self, _: int, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)

    def _restore(self, key: int, argument: Any) -> None:
        row, told = argument
        self._begin(key, row)
        environment = self._open[key]
        for operation, value in told:
            if operation == "step":
                environment.step(self._tokenizer.decode(value))
            else:
                environment.result(value)

    def _close(self, key: int, _: Any) -> None:
        environment = self._open.pop(key, None)
        if environment is not None:
            environment.close()

    def _action(self, action: Any, tools: bool) -> list[Any]:
        if isinstance(action, dict):
            if tools and isinstance(action.get("tool"), str):
                return ["tool", [action["tool"], action.get("input")]]
            if isinstance(action.get("append"), str):
                return ["append", self._tokenizer.encode(action["append"])]
            if action.get("done") is True:
                return ["done", None]
        offered = "{'tool': name, 'input': x}, " if tools else ""
        raise TypeError(f"an environment answers {offered}{{'append': str}} or {{'done': True}}")


class SingleTurn:
    """The environment of a job that names none: the prompt, one turn, done."""

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt

    @classmethod
    def factory(cls, prompt: str) -> Callable[[], SingleTurn]:
        return lambda: cls(prompt)

    def open(self, row: dict[str, Any]) -> str:
        return str(row[self._prompt])

    def step(self, text: str) -> dict[str, Any]:
        return {"done": True}

    def close(self) -> None:
        return None


def resolve(reference: str, directory: str) -> Callable[..., Any]:
    """The object that `module:function` names, with `directory` first on the path."""
    if directory not in sys.path:
        sys.path.insert(0, directory)
    module, _, name = reference.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--use", default="", help="module:function, the environment's factory")
    parser.add_argument("--modules", default=".", help="directory of the job's modules")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--prompt", default="prompt", help="the row's key that holds the prompt")
    arguments = parser.parse_args()
    channel = Channel.from_env()
    factory = resolve(arguments.use, arguments.modules) if arguments.use else None
    served = Environments(factory, Tokenizer.load(arguments.tokenizer), arguments.prompt)
    while (block := channel.recv()) is not None:
        answers = [
            [key, *served.perform(key, operation, argument)]
            for key, operation, argument in msgpack.unpackb(block, raw=False)
        ]
        channel.send(msgpack.packb(answers, use_bin_type=True))


if __name__ == "__main__":
    main()
