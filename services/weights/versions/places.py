"""What is wrong with the directories and URLs that a person names, found out before anything is
loaded or written.
"""

from __future__ import annotations

import errno
from pathlib import Path

from common.base.errors import ConfigError, MeshError, NotFound, Refused, StorageFull
from common.base.files.append_file import FULL
from common.base.files.at_url import is_url, without_secrets
from services.weights.making import check_ours

TOKENIZER, CONFIG = "tokenizer.json", "config.json"
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


def check_model(directory: Path, run: Path) -> None:
    """Returns if a directory may hold a model, and `run` may be made of it; NotFound, ConfigError,
    Refused.
    """
    if not directory.is_dir():
        file = directory.exists()
        raise NotFound(
            f"{directory} is no directory" if file else f"there is no directory {directory}",
            fix="Name a Hugging Face directory",
        )
    if (directory / "job.json").is_file():
        raise Refused(
            f"{directory} is a run already",
            fix="Name a Hugging Face directory, as its `model` is one",
        )
    if not (directory / TOKENIZER).is_file():
        raise ConfigError(
            f"{directory} has no {TOKENIZER}",
            fix="Save its tokenizer there: AutoTokenizer.from_pretrained(...).save_pretrained(...)",
        )
    if not (directory / CONFIG).is_file():
        raise ConfigError(
            f"{directory} has no {CONFIG}",
            fix="Name a directory as `save_pretrained` writes one; of adapters, the merged model's",
        )
    if run.exists():
        raise Refused(f"{run} is there already", fix="Name another --out")


def check_out(out: str) -> None:
    """Returns if a model may be written there, as far as that can be told at once; ConfigError,
    Refused when something else lies there.
    """
    if not is_url(out):
        if not Path(out).resolve().name:
            raise ConfigError(f"{out} takes no model", fix="Name a directory of its own: --out DIR")
        check_ours(Path(out))
    elif out.startswith("memory://"):
        raise ConfigError(
            f"{without_secrets(out)} ends with the process that writes there",
            where="--out",
            fix="Take s3://BUCKET/PATH, gs://, file:///DIRECTORY, ...",
        )


def trouble(error: OSError) -> MeshError:
    """What a person is told of a file that cannot be read or written."""
    why = error.strerror or str(error)
    where = str(error.filename2 or error.filename or "")
    if error.errno in FULL:
        return StorageFull(
            f"there is no room: {why}",
            where=where,
            fix="Free some, or name a place on another disk; nothing is left there half",
        )
    if error.errno in _DENIED:
        return Refused(
            f"this user may not do so: {why}",
            where=where,
            fix="Name a place that you may write to, or ask whose it is",
        )
    return MeshError(
        f"a file or directory cannot be read or written: {why}",
        where=where,
        fix="See that the path is what you mean, and that its disk answers",
    )
