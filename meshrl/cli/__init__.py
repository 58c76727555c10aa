"""The command line: the arguments and output of each command. What a command does is imported when
it runs. Open `arguments.py` first.

Nothing heavy is imported here, so that `meshrl --help` and errors in a job file come at once.
"""

# In the order in which `meshrl --help` shows the commands.
from meshrl.cli import runs, weights, monitoring, meshes, hosts, tokens  # isort: skip
from meshrl.cli.arguments import app

__all__ = ["app", "hosts", "meshes", "monitoring", "runs", "tokens", "weights"]
