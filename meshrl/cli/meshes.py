"""Commands for meshes that stay up, and for the host they are on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshrl.cli.arguments import AsJson, MeshOption, app


@app.command(rich_help_panel="Meshes")
def up(
    workers: Annotated[int, typer.Option(metavar="N", help="Accelerators, or CPU slots.")] = 3,
    shards: Annotated[int, typer.Option(metavar="N", help="Rollout shards.")] = 1,
    device: Annotated[str, typer.Option(help="What workers are: cpu, or cuda.")] = "cpu",
    root: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where it keeps its files; default .meshrl.")
    ] = None,
    bind: Annotated[str, typer.Option(help="Where every process listens.")] = "tcp://127.0.0.1:*",
    advertise: Annotated[str, typer.Option(help="What it tells others; default: `bind`.")] = "",
    metrics: Annotated[
        str, typer.Option(help="Where each process serves its metrics, HOST:PORTS; or off.")
    ] = "127.0.0.1:*",
    ranks: Annotated[
        int, typer.Option(metavar="N", help="Workers that train together: a job's training.ranks.")
    ] = 1,
    sandboxes: Annotated[
        int, typer.Option(metavar="N", help="Sandbox processes, for tools and rewards.")
    ] = 1,
) -> None:
    """Starts a mesh in the background, for jobs that are submitted to it.

    $MESHRL_REDIS_URL names a Redis to use instead of an embedded one.

    Example:

        meshrl up --workers 4

        meshrl submit examples/calculator.toml

        meshrl down
    """
    from meshrl.launch import up_down

    up_down.up(root, workers, shards, device, bind, advertise, metrics, ranks, sandboxes)


@app.command(rich_help_panel="Meshes")
def down(mesh: MeshOption = None) -> None:
    """Stops a mesh with everything it started.

    Example:

        meshrl down
    """
    from meshrl.launch import up_down

    up_down.down(mesh)


@app.command(rich_help_panel="Meshes")
def workers(json: AsJson = False, mesh: MeshOption = None) -> None:
    """Shows each worker with its accelerator, its role and the role it is to have.

    Example:

        meshrl workers
    """
    from meshrl import commands

    commands.workers(mesh, json)


@app.command(rich_help_panel="Meshes")
def move(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="As in `meshrl workers`: g1.")],
    role: Annotated[str, typer.Argument(metavar="ROLE", help="rollout, training or idle.")],
    mesh: MeshOption = None,
) -> None:
    """Gives a worker another role and keeps it there; the others go on.

    Example:

        meshrl move g1 training
    """
    from meshrl import commands

    commands.move(worker, role, mesh)


@app.command(rich_help_panel="Help")
def doctor() -> None:
    """Checks what this machine offers a mesh; each line that is not ok says the fix.

    Example:

        meshrl doctor
    """
    from meshrl import doctor as checks

    raise typer.Exit(checks.show())


engine = typer.Typer(no_args_is_help=True, help="Engines with an interpreter of their own.")
app.add_typer(engine, name="engine", rich_help_panel="Help")


@engine.callback()
def _engine() -> None:
    """Engines with an interpreter of their own."""


@engine.command()
def install(
    name: Annotated[str, typer.Argument(metavar="NAME", help="sglang.", show_default=False)],
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", metavar="DIR", help="Default: below $MESHRL_ENGINES or ~/.cache/meshrl."
        ),
    ] = None,
) -> None:
    """Builds an engine's own environment, and prints its interpreter.

    A job finds it by itself; with --dir, name the interpreter in `rollout.sglang_python`.

    Example:

        meshrl engine install sglang
    """
    from meshrl import engines

    print(engines.install(name, directory))
