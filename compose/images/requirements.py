"""Printer of the requirements of `pyproject.toml`, with the extras given as "a,b".

Images install them in a layer of their own, which stays until these requirements change.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = [name for name in sys.argv[1].split(",") if name]
print(*project["dependencies"], sep="\n")
for extra in extras:
    print(*project["optional-dependencies"][extra], sep="\n")
