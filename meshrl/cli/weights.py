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
    help="List, pin, export, import and compare weight versions of a run.",
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
            "--explain",
            help="Print the transport of the last version to each process, and the reason.",
        ),
    ] = False,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="RUN", help="With --explain: a run or a job of the mesh."),
    ] = None,
    json: JsonOption = False,
    mesh: MeshOption = None,
) -> None:
    if context.invoked_subcommand is not None:
        if explain:
            raise typer.BadParameter("--explain takes no subcommand")
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
    """Show the versions of a run in the store, and why each is retained.

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
    note: Annotated[str, typer.Option(metavar="TEXT", help="Reason for the pin.")] = "",
    json: JsonOption = False,
    mesh: MeshOption = None,
    token: TokenOption = None,
) -> None:
    """Retain a version until it is unpinned, even after the run ends or its job is deleted.

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
    """Remove a pin; the version is deleted unless something else retains it.

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
    """Write a version as a Hugging Face directory, here or at any URL that fsspec supports.

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
        Path | None,
        typer.Option(metavar="RUN", help="Run directory to create; default: runs/NAME of DIR."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Data type of the version: float32 or bfloat16.")
    ] = "float32",
    json: JsonOption = False,
) -> None:
    """Create a run from a Hugging Face directory, with its weights as version 0.

    The version can be compared, evaluated, exported, and used as the start of a job.

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
        Path | None, typer.Option("--of", metavar="RUN", help="Run of V2; default: RUN.")
    ] = None,
    limit: Annotated[
        int, typer.Option("-n", metavar="N", min=0, help="Tensors to show; 0: all.")
    ] = 20,
    json: JsonOption = False,
    mesh: MeshOption = None,
) -> None:
    """Compare two versions tensor by tensor: share of changed elements, and largest change.

    Examples:

        meshrl weights diff runs/calculator 8 12

        meshrl weights diff runs/calculator 0 best --json
    """
    from meshrl.commands import weights as commands

    commands.diff_versions(run, first, second, other, limit, mesh, json)
