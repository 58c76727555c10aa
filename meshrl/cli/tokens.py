"""Commands for tokens, which admit users and hosts, and for the secrets of a new mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshrl.cli.arguments import CommandGroup, JsonOption, MeshOption, app

token = CommandGroup(
    no_args_is_help=True,
    help="Create, list and revoke tokens with which users and hosts reach a mesh.",
)
app.add_typer(token, name="token", rich_help_panel="Meshes")


@token.command()
def create(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="User of the token; a host token needs none."),
    ] = None,
    days: Annotated[float, typer.Option(min=0.0, help="Days until the token expires.")] = 30.0,
    host: Annotated[
        bool, typer.Option("--host", help="Create a token with which hosts join the mesh.")
    ] = False,
    hours: Annotated[float, typer.Option(min=0.0, help="Hours until a host token expires.")] = 24.0,
    uses: Annotated[
        int, typer.Option(metavar="N", min=0, help="Hosts that a host token admits; 0: any number.")
    ] = 1,
    priority: Annotated[
        int, typer.Option(metavar="N", help="Highest `pool.priority` that its jobs may have.")
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the token to FILE, readable only by you."),
    ] = None,
    mesh: MeshOption = None,
) -> None:
    """Create a token and print it once: the mesh keeps no copy.

    The holder of a user's token runs code as you, through submitted jobs, and sees only those jobs.

    Examples:

        meshrl token create alice --days 7 --out alice.token

        meshrl token create --host --hours 2 --out gpu2.token

        meshrl token create --host --uses 0 --hours 720 --out gpus.token
    """
    from meshrl.commands import tokens

    if host:
        tokens.print_new_host_token(name, hours, uses, out, mesh)
    elif name is None:
        raise typer.BadParameter("name the user of the token, or give --host")
    else:
        tokens.create_token(name, days, priority, out, mesh)


@token.command("list")
def list_(json: JsonOption = False, mesh: MeshOption = None) -> None:
    """Show the created tokens, and which of them are valid.

    Example:

        meshrl token list
    """
    from meshrl.commands import tokens

    tokens.print_tokens(mesh, json)


@token.command()
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name or id of the token.")],
    mesh: MeshOption = None,
) -> None:
    """Revoke a token at once. Jobs that it submitted continue, and hosts that it admitted stay.

    Example:

        meshrl token revoke alice
    """
    from meshrl.commands import tokens

    tokens.revoke_tokens(name, mesh)


@app.command(rich_help_panel="Hosts")
def secrets(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory to create.", show_default=False)
    ],
    head: Annotated[
        str,
        typer.Option(metavar="NAME[:PORT]", help="Name by which hosts reach the head's gateway."),
    ],
    exposed: Annotated[
        str,
        typer.Option(metavar="NAME[:PORT]", help="Name by which users reach the head's gateway."),
    ] = "localhost",
    redis: Annotated[
        str,
        typer.Option(metavar="NAME[:PORT]", help="Name of a separate Redis; default: the head's."),
    ] = "",
    days: Annotated[float, typer.Option(min=0.0, help="Days until the tokens expire.")] = 365.0,
) -> None:
    """Create the secrets of a mesh before it starts: for its head, its hosts and its users.

    They are for containers that an orchestrator starts in any order, each with one of these files.

    Examples:

        meshrl secrets secrets --head head

        meshrl secrets secrets --head head:7199 --exposed mesh.example.org --redis redis
    """
    from meshrl.commands import tokens

    tokens.make_secrets(directory, head, exposed, redis, days)
