"""`meshrl logs`: the last lines of a mesh's log files, each with the name of its process."""

from __future__ import annotations

import time
from pathlib import Path

from common.errors import ConfigError, NotFound
from meshrl.run.target import place_of

POLL_S = 0.3
TAIL_BYTES = 1 << 18  # enough for any number of lines one would read


def show(words: list[str], mesh: Path | None, lines: int, follow: bool) -> None:
    """`words`: a run or a mesh, a service of it, or both, in either order."""
    where = next((Path(word) for word in words if Path(word).is_dir()), None)
    named = [word for word in words if where is None or Path(word) != where]
    if len(named) > 1:
        raise ConfigError(
            f"{' and '.join(named)} are two services", fix="Name one, or none for all"
        )
    service = named[0] if named else None
    place = place_of(where, mesh)
    wanted = place.log(service) if service else None
    paths = sorted(place.logs.glob("*.log"))
    if wanted is not None:
        if wanted not in paths:
            names = ", ".join(path.stem for path in paths) or "none yet"
            raise NotFound(f"there is no log of {service}", fix=f"There are: {names}")
        paths = [wanted]
    ends: dict[Path, int] = {}
    for path in paths:
        ends[path] = path.stat().st_size
        _print(path, tail(path, lines), len(paths) > 1)
    while follow:
        time.sleep(POLL_S)
        for path in paths if wanted else sorted(place.logs.glob("*.log")):
            start, size = ends.get(path, 0), path.stat().st_size
            if size > start:
                with path.open("rb") as file:
                    file.seek(start)
                    grown = file.read(size - start)
                whole = grown[: grown.rfind(b"\n") + 1]
                ends[path] = start + len(whole)
                _print(path, whole.decode(errors="replace").splitlines(), wanted is None)


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a file, without reading all of it."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-lines:] if lines > 0 else []


def _print(path: Path, lines: list[str], named: bool) -> None:
    for line in lines:
        print(f"{path.stem}: {line}" if named else line, flush=True)
