"""`meshrl init`: writes a job that runs as it is, to begin an own one from."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from meshrl.common.base.errors import ConfigError, NotFound, Refused

GAME_DIR = Path(__file__).parent / "game"
DATA_FILES = ("train.jsonl", "held_out.jsonl", "tokenizer.json")
GAME_FILES = ("job.toml", "game.py", *DATA_FILES)
NAME_PATTERN = re.compile(r"[A-Za-z0-9._-]+")  # what a run may be called
EXAMPLE_MODULES = {"calculator": "calculator.py", "chat": "chat.py", "code": "programs.py"}


def create_job(directory: Path, example: str = "") -> None:
    """Writes the job into a directory, which gives it its name: the game of guessing, or one of
    EXAMPLES. Refused when anything is there.
    """
    if example:
        files = _find_example_files(example)
        _copy_files(directory, f"{example}.toml", files)
        print(f"{directory}: the example {example}, as `{example}.toml` describes it")
        print(f"Run it: meshrl run {directory / f'{example}.toml'}")
        return
    _copy_files(directory, "job.toml", {file: GAME_DIR / file for file in GAME_FILES})
    print(f"{directory}: a model from scratch learns a guessing game in a minute or two")
    print(f"  {'job.toml':<15} what is trained, and how")
    print(f"  {'game.py':<15} the environment, the reward, and what wrote data and tokenizer")
    print(f"Run it: meshrl run {directory / 'job.toml'}")


def _copy_files(directory: Path, job_file: str, files: dict[str, Path]) -> None:
    """Copies files to their names in a new directory; `job` is called as that is."""
    name = directory.absolute().name
    if not NAME_PATTERN.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a job", fix="Letters, digits, `.`, `_` and `-` can be"
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise Refused(
            f"{directory} is there already", fix="Name another directory, or an empty one"
        )
    try:
        for file, source in files.items():
            content = source.read_text(encoding="utf-8")
            if file == job_file:
                content = re.sub(
                    '^name = ".*"$', f'name = "{name}"', content, count=1, flags=re.MULTILINE
                )
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            (directory / file).write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be written: {error.strerror}", fix="Name another directory"
        ) from error


def _find_example_files(name: str) -> dict[str, Path]:
    """Return the paths of an example's files by name; NotFound if it is missing."""
    if name not in EXAMPLE_MODULES:
        raise NotFound(
            f"no example is called {name}", fix=f"There are {', '.join(EXAMPLE_MODULES)}"
        )
    files = [f"{name}.toml", EXAMPLE_MODULES[name], *(f"{name}/{file}" for file in DATA_FILES)]
    root = Path(__file__).parents[2] / "examples"  # of a checkout
    if not (root / files[0]).is_file():
        for placed in importlib.metadata.files("meshrl") or ():  # where a wheel has put it
            if placed.name == files[0] and placed.parent.name == "examples":
                root = Path(str(placed.locate())).resolve().parent
                break
        else:
            raise NotFound(
                f"this installation of MeshRL has no {files[0]}",
                fix="Install the wheel again with pip",
            )
    return {file: root / file for file in files}
