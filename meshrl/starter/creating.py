"""`meshrl init`: writes a job that runs as it is, to begin an own one from."""

from __future__ import annotations

import re
from pathlib import Path

from common.errors import ConfigError, Refused

GAME = Path(__file__).parent / "game"
FILES = ("job.toml", "game.py", "train.jsonl", "held_out.jsonl", "tokenizer.json")
NAME = re.compile(r"[A-Za-z0-9._-]+")  # what a run may be called


def create(directory: Path) -> None:
    """Writes the job into a directory, which gives it its name; Refused when anything is there."""
    name = directory.absolute().name
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a job", fix="Letters, digits, `.`, `_` and `-` can be"
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise Refused(
            f"{directory} is there already", fix="Name another directory, or an empty one"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for file in FILES:
            content = (GAME / file).read_text(encoding="utf-8")
            if file == "job.toml":
                content = content.replace('name = "game"', f'name = "{name}"', 1)
            (directory / file).write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be written: {error.strerror}", fix="Name another directory"
        ) from error
    print(f"{directory}: a model from scratch learns a guessing game in a minute or two")
    print(f"  {'job.toml':<15} what is trained, and how")
    print(f"  {'game.py':<15} the environment, the reward, and what wrote data and tokenizer")
    print(f"Run it: meshrl run {directory / 'job.toml'}")
