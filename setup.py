"""The command `sdist`, which keeps the links of meshrl/; all else is in pyproject.toml."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

LINKED = [place.name for place in Path("meshrl").iterdir() if place.is_symlink()]


class SdistWithLinks(sdist):
    """Archive each linked package once: setuptools writes a copy in place of a link."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Write the tree of the archive, with links from meshrl/ to the packages beside it."""
        super().make_release_tree(base_dir, files)
        for name in LINKED:
            place = Path(base_dir, "meshrl", name)
            shutil.rmtree(place)
            place.symlink_to(f"../{name}", target_is_directory=True)


setup(cmdclass={"sdist": SdistWithLinks})
