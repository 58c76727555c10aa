"""Commands for the weight versions of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshrl.cli.arguments import AsJson, Commands, MeshOption, RunOrJob, RunOrMesh, TokenOption, app

weights = Commands(
    invoke_without_command=True,
    help="Weight versions of a run: which there are, which stay, how they differ.",
)
app.add_typer(weights, name="weights", rich_help_panel="Runs")

VERSION = "A number, LINEAGE/NUMBER, last, best, or the first digits of its manifest."
Version = Annotated[str, typer.Argument(metavar="VERSION", help=VERSION)]


@weights.callback()
def _weights(
    context: typer.Context,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Says by which way each process got the last version, and why."
        ),
    ] = False,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="RUN", help="Of --explain: a run or a job of the mesh."),
    ] = None,
    json: AsJson = False,
    mesh: MeshOption = None,
) -> None:
    if context.invoked_subcommand is not None:
        if explain:
            raise typer.BadParameter("--explain stands alone")
        return
    if not explain:
        print(context.get_help())
        return
    from meshrl.commands import weights as commands

    commands.explain(run, mesh, json)


@weights.command("list")
def list_(
    run: RunOrMesh = None, json: AsJson = False, mesh: MeshOption = None, token: TokenOption = None
) -> None:
    """Shows the versions that the store has of a run, and what keeps each.

    Examples:

        meshrl weights list runs/calculator

        meshrl weights list --json
    """
    from meshrl.commands import weights as commands

    commands.show(run, mesh, token, json)


@weights.command()
def pin(
    run: RunOrJob,
    version: Version,
    note: Annotated[str, typer.Option(metavar="TEXT", help="Why it is kept.")] = "",
    json: AsJson = False,
    mesh: MeshOption = None,
    token: TokenOption = None,
) -> None:
    """Keeps a version until it is unpinned, also when the run is over or its job deleted.

    Example:

        meshrl weights pin runs/calculator 12 --note "of the paper"
    """
    from meshrl.commands import weights as commands

    commands.pin(run, version, note, mesh, token, json)


@weights.command()
def unpin(
    run: RunOrJob,
    version: Version,
    json: AsJson = False,
    mesh: MeshOption = None,
    token: TokenOption = None,
) -> None:
    """Ends a pin: the version goes, unless something else keeps it.

    Example:

        meshrl weights unpin runs/calculator 12
    """
    from meshrl.commands import weights as commands

    commands.unpin(run, version, mesh, token, json)


@weights.command()
def export(
    run: RunOrJob,
    version: Version = "last",
    out: Annotated[
        str,
        typer.Option(metavar="DIR|URL", help="Default: RUN/model-VERSION; or s3://BUCKET/PATH."),
    ] = "",
    json: AsJson = False,
    mesh: MeshOption = None,
) -> None:
    """Writes a version as a Hugging Face directory, here or at a URL of any kind that fsspec knows.

    Examples:

        meshrl weights export runs/calculator 12

        meshrl weights export runs/calculator best --out s3://models/calculator
    """
    from meshrl.commands import weights as commands

    commands.export(run, version, out, mesh, json)


@weights.command("import")
def import_(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A Hugging Face directory.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Is made; default: runs/NAME of DIR.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="The type of the version: float32 or bfloat16.")
    ] = "float32",
    json: AsJson = False,
) -> None:
    """Makes a run of a Hugging Face directory: its weights are version 0 there, to be compared,
    evaluated, exported, and begun from.

    Examples:

        meshrl weights import Qwen2.5-0.5B

        meshrl weights import Qwen2.5-0.5B --out runs/base --dtype bfloat16
    """
    from meshrl.commands import weights as commands

    commands.import_(directory, out, dtype, json)


@weights.command()
def diff(
    run: RunOrJob,
    first: Annotated[str, typer.Argument(metavar="V1", help=VERSION)],
    second: Annotated[str, typer.Argument(metavar="V2", help=VERSION)] = "last",
    other: Annotated[
        Path | None, typer.Option("--of", metavar="RUN", help="The run that V2 is of.")
    ] = None,
    most: Annotated[
        int, typer.Option("-n", metavar="N", min=0, help="Tensors that are shown; 0: all.")
    ] = 20,
    json: AsJson = False,
    mesh: MeshOption = None,
) -> None:
    """Compares two versions tensor by tensor: which share of the elements has changed, and the
    largest change.

    Examples:

        meshrl weights diff runs/calculator 8 12

        meshrl weights diff runs/calculator 0 best --json
    """
    from meshrl.commands import weights as commands

    commands.diff(run, first, second, other, most, mesh, json)
