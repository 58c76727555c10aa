"""Commands for the weight versions of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshrl.cli.arguments import (
    CommandGroup,
    JsonOption,
    MeshOption,
    RunOrJobArgument,
    RunOrMeshArgument,
    TokenOption,
    app,
)

weights = CommandGroup(
    invoke_without_command=True,
    help="Weight versions of a run: which there are, which stay, how they differ.",
)
app.add_typer(weights, name="weights", rich_help_panel="Runs")

VERSION_HELP = "A number, LINEAGE/NUMBER, last, best, or the first digits of its manifest."
VersionArgument = Annotated[str, typer.Argument(metavar="VERSION", help=VERSION_HELP)]


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
    json: JsonOption = False,
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

    commands.explain_transports(run, mesh, json)


@weights.command("list")
def list_(
    run: RunOrMeshArgument = None,
    json: JsonOption = False,
    mesh: MeshOption = None,
    token: TokenOption = None,
) -> None:
    """Shows the versions that the store has of a run, and what keeps each.

    Examples:

        meshrl weights list runs/calculator

        meshrl weights list --json
    """
    from meshrl.commands import weights as commands

    commands.print_versions(run, mesh, token, json)


@weights.command()
def pin(
    run: RunOrJobArgument,
    version: VersionArgument,
    note: Annotated[str, typer.Option(metavar="TEXT", help="Why it is kept.")] = "",
    json: JsonOption = False,
    mesh: MeshOption = None,
    token: TokenOption = None,
) -> None:
    """Keeps a version until it is unpinned, also when the run is over or its job deleted.

    Example:

        meshrl weights pin runs/calculator 12 --note "of the paper"
    """
    from meshrl.commands import weights as commands

    commands.pin_version(run, version, note, mesh, token, json)


@weights.command()
def unpin(
    run: RunOrJobArgument,
    version: VersionArgument,
    json: JsonOption = False,
    mesh: MeshOption = None,
    token: TokenOption = None,
) -> None:
    """Ends a pin: the version goes, unless something else keeps it.

    Example:

        meshrl weights unpin runs/calculator 12
    """
    from meshrl.commands import weights as commands

    commands.unpin_version(run, version, mesh, token, json)


@weights.command()
def export(
    run: RunOrJobArgument,
    version: VersionArgument = "last",
    out: Annotated[
        str,
        typer.Option(metavar="DIR|URL", help="Default: RUN/model-VERSION; or s3://BUCKET/PATH."),
    ] = "",
    json: JsonOption = False,
    mesh: MeshOption = None,
) -> None:
    """Writes a version as a Hugging Face directory, here or at a URL of any kind that fsspec knows.

    Examples:

        meshrl weights export runs/calculator 12

        meshrl weights export runs/calculator best --out s3://models/calculator
    """
    from meshrl.commands import weights as commands

    commands.export_version(run, version, out, mesh, json)


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
    json: JsonOption = False,
) -> None:
    """Makes a run of a Hugging Face directory: its weights are version 0 there, to be compared,
    evaluated, exported, and begun from.

    Examples:

        meshrl weights import Qwen2.5-0.5B

        meshrl weights import Qwen2.5-0.5B --out runs/base --dtype bfloat16
    """
    from meshrl.commands import weights as commands

    commands.import_model(directory, out, dtype, json)


@weights.command()
def diff(
    run: RunOrJobArgument,
    first: Annotated[str, typer.Argument(metavar="V1", help=VERSION_HELP)],
    second: Annotated[str, typer.Argument(metavar="V2", help=VERSION_HELP)] = "last",
    other: Annotated[
        Path | None, typer.Option("--of", metavar="RUN", help="The run that V2 is of.")
    ] = None,
    limit: Annotated[
        int, typer.Option("-n", metavar="N", min=0, help="Tensors that are shown; 0: all.")
    ] = 20,
    json: JsonOption = False,
    mesh: MeshOption = None,
) -> None:
    """Compares two versions tensor by tensor: which share of the elements has changed, and the
    largest change.

    Examples:

        meshrl weights diff runs/calculator 8 12

        meshrl weights diff runs/calculator 0 best --json
    """
    from meshrl.commands import weights as commands

    commands.diff_versions(run, first, second, other, limit, mesh, json)
