"""Prints what `pyproject.toml` in the working directory requires, with the extras that are named
(a,b): a layer of packages that lasts until these change.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = [name for name in sys.argv[1].split(",") if name]
print(*project["dependencies"], sep="\n")
for extra in extras:
    print(*project["optional-dependencies"][extra], sep="\n")
