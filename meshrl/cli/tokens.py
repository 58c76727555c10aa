"""Commands for tokens, which let people and hosts in, and for all secrets of a mesh to be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshrl.cli.arguments import CommandGroup, JsonOption, MeshOption, app

token = CommandGroup(
    no_args_is_help=True, help="Tokens, by which other people hand jobs to a mesh of yours."
)
app.add_typer(token, name="token", rich_help_panel="Meshes")


@token.command()
def create(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Whom it is for; a host's needs none.")
    ] = None,
    days: Annotated[float, typer.Option(min=0.0, help="Until it expires.")] = 30.0,
    host: Annotated[
        bool, typer.Option("--host", help="For hosts that are to join the mesh.")
    ] = False,
    hours: Annotated[float, typer.Option(min=0.0, help="Until a host's expires.")] = 24.0,
    uses: Annotated[
        int, typer.Option(metavar="N", min=0, help="Hosts that a host's lets in; 0: any number.")
    ] = 1,
    priority: Annotated[
        int, typer.Option(metavar="N", help="The highest `pool.priority` of its jobs.")
    ] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Writes it there, for your eyes alone.")
    ] = None,
    mesh: MeshOption = None,
) -> None:
    """Makes a token and prints it, once: the mesh keeps no copy.

    Who has it runs code as you, by the jobs that it hands in, and sees those jobs alone.

    Example:

        meshrl token create alice --days 7 --out alice.token

        meshrl token create --host --hours 2 --out gpu2.token

        meshrl token create --host --uses 0 --hours 720 --out gpus.token
    """
    from meshrl.commands import tokens

    if host:
        tokens.print_new_host_token(name, hours, uses, out, mesh)
    elif name is None:
        raise typer.BadParameter("whom is it for? (or --host)")
    else:
        tokens.create_token(name, days, priority, out, mesh)


@token.command("list")
def list_(json: JsonOption = False, mesh: MeshOption = None) -> None:
    """Shows the tokens that were given, and which are good.

    Example:

        meshrl token list
    """
    from meshrl.commands import tokens

    tokens.print_tokens(mesh, json)


@token.command()
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whom it is for, or its id.")],
    mesh: MeshOption = None,
) -> None:
    """Makes a token good no more, at once. Jobs that it has handed in go on, and hosts that it has
    let in stay.

    Example:

        meshrl token revoke alice
    """
    from meshrl.commands import tokens

    tokens.revoke_tokens(name, mesh)


@app.command(rich_help_panel="Hosts")
def secrets(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Is made.", show_default=False)],
    head: Annotated[
        str, typer.Option(metavar="NAME[:PORT]", help="By which hosts reach the head's gateway.")
    ],
    exposed: Annotated[
        str, typer.Option(metavar="NAME[:PORT]", help="By which people reach it.")
    ] = "localhost",
    redis: Annotated[
        str,
        typer.Option(metavar="NAME[:PORT]", help="Of a Redis of its own; default: the head's."),
    ] = "",
    days: Annotated[float, typer.Option(min=0.0, help="Until the tokens expire.")] = 365.0,
) -> None:
    """Makes the secrets of a mesh before it is there: for the head, for hosts, for people.

    For containers, which an orchestrator starts in any order, each with a file of these.

    Examples:

        meshrl secrets secrets --head head

        meshrl secrets secrets --head head:7199 --exposed mesh.example.org --redis redis
    """
    from meshrl.commands import tokens

    tokens.make_secrets(directory, head, exposed, redis, days)
