"""`meshrl init`: a job that runs unchanged, an example or a recipe, as a start for a new job."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from meshrl.common.base.errors import ConfigError, NotFound, Refused

GAME_DIR = Path(__file__).parent / "game"
DATA_FILES = ("train.jsonl", "held_out.jsonl", "tokenizer.json")
GAME_FILES = ("job.toml", "game.py", *DATA_FILES)
NAME_PATTERN = re.compile(r"[A-Za-z0-9._-]+")  # names of runs
EXAMPLE_MODULES = {"calculator": "calculator.py", "chat": "chat.py", "code": "programs.py"}
# Recipes train models of the Hub; their modules by name.
RECIPE_MODULES = {
    "gsm8k": (),
    "gsm8k-lora": (),
    "dapo-math": (),
    "python-agent": (),
    "verifiers": ("reverse_text.py",),
    "mbpp": ("mbpp.py",),
    "sft": (),
    "rl-after-sft": (),
    "distill": (),
}


def create_job(directory: Path, example: str = "") -> None:
    """Write a job into a new directory, whose name it gets.

    The job is the guessing game, or `example`: an example or a recipe. Raises Refused if the
    directory has files, and NotFound for an unknown example.
    """
    if example:
        files = _find_example_files(example)
        _copy_files(directory, f"{example}.toml", files)
        kind = "recipe" if example in RECIPE_MODULES else "example"
        print(f"{directory}: the {kind} {example}, as `{example}.toml` describes it")
        job = directory / f"{example}.toml"
        if kind == "recipe":
            print(f"Check it: meshrl run {job} --dry-run")
        print(f"Run it: meshrl run {job}")
        return
    _copy_files(directory, "job.toml", {file: GAME_DIR / file for file in GAME_FILES})
    print(f"{directory}: a model from scratch learns a guessing game in a minute or two")
    print(f"  {'job.toml':<15} what is trained, and how")
    print(f"  {'game.py':<15} the environment, the reward, and what wrote data and tokenizer")
    print(f"Run it: meshrl run {directory / 'job.toml'}")


def _copy_files(directory: Path, job_file: str, files: dict[str, Path]) -> None:
    """Copy files to their names in a new directory; the job in `job_file` gets its name."""
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
    if name in EXAMPLE_MODULES:
        files = (f"{name}.toml", EXAMPLE_MODULES[name], *(f"{name}/{file}" for file in DATA_FILES))
        return {file: _find_examples_dir() / file for file in files}
    if name in RECIPE_MODULES:
        recipes = _find_examples_dir() / "recipes"
        return {file: recipes / file for file in (f"{name}.toml", *RECIPE_MODULES[name])}
    raise NotFound(
        f"no example is called {name}",
        fix=f"There are {', '.join(EXAMPLE_MODULES)}, and the recipes {', '.join(RECIPE_MODULES)}",
    )


def _find_examples_dir() -> Path:
    """Return the examples' directory of this checkout or installation; NotFound without one."""
    root = Path(__file__).parents[2] / "examples"  # of a checkout
    if (root / "calculator.toml").is_file():
        return root
    for installed in importlib.metadata.files("meshrl") or ():  # of a wheel
        if installed.name == "calculator.toml" and installed.parent.name == "examples":
            return Path(str(installed.locate())).resolve().parent
    raise NotFound(
        "this installation of MeshRL has no examples", fix="Install the wheel again with pip"
    )
