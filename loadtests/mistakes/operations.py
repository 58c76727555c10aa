"""URLs with secrets, control characters in texts, and damage to the mesh's Redis."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from loadtests.mistakes.commands import finished
from loadtests.mistakes.job import CODE, Place
from loadtests.mistakes.mistake import Mistake

_SECRET = "hunter2"
_NOBODY = "127.0.0.1:46399"  # no server listens there
_ESCAPE = "\x1b[31m\x1b]0;title\x07"
_SHOWN = r"\\(u00|x)1b\[31m"
_APPEND_ONLY = "runs/mine/mesh/redis/appendonlydir"


def _redis(url: str) -> dict[str, str]:
    return {"MESHRL_REDIS_URL": url}


def _unescaped(mark: str, escape: str) -> Mistake:
    """A password of Redis with a character that ends the part of a URL."""
    return Mistake(
        f"operations: a Redis password with an unescaped {mark}",
        ("MESHRL_REDIS_URL", rf"\*\*\*@{_NOBODY}", escape),
        environ=_redis(f"redis://me:{_SECRET}{mark}{_SECRET}@{_NOBODY}/0"),
        hides=(_SECRET,),
    )


def _judge(url: str) -> dict[str, str | None]:
    return {
        "reward.use": None,
        "reward.judge.use": url,
        "reward.judge.template": "{prompt} {answer}",
        "reward.judge.model": "judge",
    }


def _damaged(harm: Callable[[Path], None]) -> Callable[[Place], AbstractContextManager[None]]:
    """A finished run whose Redis data is damaged."""

    @contextmanager
    def prepare(place: Place) -> Iterator[None]:
        with finished(place):
            harm(place.path(_APPEND_ONLY))
            yield

    return prepare


def _flip(folder: Path) -> None:
    [file] = folder.glob("*.incr.aof")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _resumed(name: str, harm: Callable[[Path], None]) -> Mistake:
    return Mistake(
        f"operations: resume with Redis data that is {name}",
        (r"mesh/redis is damaged", "newest checkpoints"),
        running=True,
        ends=False,
        argv=("resume", "runs/mine", "--set", "budget.steps=1000"),
        prepare=_damaged(harm),
        changes=("runs",),
    )


MISTAKES = (
    _unescaped("/", "%2F"),
    _unescaped("#", "%23"),
    _unescaped("?", r"%3F"),
    _unescaped("[", "%5B"),
    Mistake(
        "operations: a Redis password as an option",
        ("refused|connect", r"password=\*\*\*"),
        environ=_redis(f"redis://{_NOBODY}/0?db=0&password={_SECRET}"),
        hides=(_SECRET,),
    ),
    Mistake(
        "operations: an encoded name of the password option",
        ("refused|connect", rf"{_NOBODY}"),
        environ=_redis(f"redis://{_NOBODY}/0?p%61ssword={_SECRET}"),
        hides=(_SECRET,),
    ),
    Mistake(
        "operations: a judge's URL with a password",
        ("password", r"reward\.judge\.key"),
        set=_judge(f"https://me:{_SECRET}@judge.invalid/v1"),
        hides=(_SECRET,),
    ),
    Mistake(
        "operations: a judge's URL with a key as an option",
        ("query", r"reward\.judge\.key"),
        set=_judge(f"https://judge.invalid/v1?api_key={_SECRET}"),
        hides=(_SECRET,),
    ),
    Mistake(
        "operations: out at a URL with a password",
        ("out", "password", "environment"),
        set={"out": f"s3://me:{_SECRET}/x@bucket/run"},
        hides=(_SECRET,),
    ),
    Mistake(
        "operations: copies at a signed URL",
        (r"weights\.copies", "query", "environment"),
        set={"weights.copies": f"file:///nowhere?sig={_SECRET}"},
        hides=(_SECRET,),
    ),
    Mistake(
        "operations: a token at a URL with a password",
        ("no token can be read", r"https://127\.0\.0\.1"),
        argv=("join", f"https://me:{_SECRET}@127.0.0.1:1/token?sig={_SECRET}"),
        hides=(_SECRET,),
    ),
    Mistake(
        "operations: escape sequences in a name",
        ("neither a run nor a mesh", _SHOWN),
        argv=("status", f"runs/{_ESCAPE}"),
        hides=("\x1b", "\x07"),
    ),
    Mistake(
        "operations: escape sequences in a key of the job file",
        ("rewrad", _SHOWN),
        set={"reward.use": f"mine:rewrad{_ESCAPE}"},
        hides=("\x1b", "\x07"),
    ),
    Mistake(
        "operations: escape sequences in an error of a module",
        (r"mine\.py", _SHOWN),
        files={"mine.py": CODE + f"\nraise RuntimeError({_ESCAPE!r} + '\\u202e')\n"},
        hides=("\x1b", "\x07", "\u202e"),
    ),
    _resumed("gone", shutil.rmtree),
    _resumed("not what was written", _flip),
)
