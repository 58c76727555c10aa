"""What a jail's root shows: an interpreter, and of its host or its image what programs need."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from services.sandbox.isolation.outer_jail.interpreters import Interpreter

JAIL = str(Path(__file__).parents[2] / "jail")  # the package that runs inside
INSIDE = "/run/meshrl"  # where it lies in a jail
PACKAGES = f"{INSIDE}/packages"  # and packages that the interpreter lacks
SYSTEM = ("/usr",)
LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
OPTIONAL = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
OURS = ("dev", "proc", "run", "sys", "tmp")  # of an image they are not shown: a jail has its own


@dataclass(frozen=True)
class RootContent:
    """What lies in the root: files and directories by their place inside, and links."""

    binds: dict[str, str]  # inside -> on this host
    links: dict[str, str]  # inside -> what it says


def content_of(interpreter: Interpreter, image: str = "") -> RootContent:
    """Return the content of a root with that interpreter; `image`: where its root lies here."""
    found = _of_image(image or interpreter.root) if interpreter.root else _of_host()
    packages = {f"{PACKAGES}/{os.path.basename(each)}": each for each in interpreter.packages}
    places = dict(zip(interpreter.places, interpreter.places, strict=True))
    return RootContent({**found.binds, **places, **packages, f"{INSIDE}/jail": JAIL}, found.links)


def _of_host() -> RootContent:
    """The host's programs and libraries."""
    binds = {place: place for place in (*SYSTEM, *OPTIONAL) if os.path.exists(place)}
    links = {}
    for link in LINKS:
        if os.path.islink(link):
            links[link] = os.readlink(link)
        elif os.path.isdir(link):
            binds[link] = link
    return RootContent(binds, links)


def _of_image(root: str) -> RootContent:
    """Each thing at the top of an image, as a link there may lead nowhere but inside."""
    binds, links = {}, {}
    for name in sorted(set(os.listdir(root)) - set(OURS)):
        place = os.path.join(root, name)
        if os.path.islink(place):
            links[f"/{name}"] = os.readlink(place)
        else:
            binds[f"/{name}"] = place
    return RootContent(binds, links)
