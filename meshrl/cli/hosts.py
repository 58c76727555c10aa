"""Commands for meshes of several hosts: these join, drain and leave."""

from __future__ import annotations

from typing import Annotated

import typer

from meshrl.cli.arguments import (
    CommandGroup,
    ForegroundOption,
    HealthOption,
    JsonOption,
    MeshOption,
    MetricsOption,
    NoWorkersOption,
    RateDownOption,
    RateUpOption,
    RootOption,
    ServicesOption,
    app,
)

DRAIN_TIMEOUT_S = 60.0  # at most: a job's core moves when a checkpoint has it
HostArgument = Annotated[
    str, typer.Argument(metavar="HOST", help="As in `meshrl hosts`, or how its name begins.")
]


@app.command(rich_help_panel="Hosts")
def join(
    context: typer.Context,
    token: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE|URL|-]",
            help="The token of the head: its file, where it is to be fetched, or - for the "
            "standard input; default: $MESHRL_JOIN, the token or its file.",
        ),
    ] = None,
    root: RootOption = None,
    workers: Annotated[
        int, typer.Option(metavar="N", min=0, help="CPU slots; 0 with cuda: one for each GPU.")
    ] = 1,
    device: Annotated[str, typer.Option(help="What workers are: cpu, or cuda.")] = "cpu",
    no_workers: NoWorkersOption = False,
    services: ServicesOption = None,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST[:LOW-HIGH]",
            help="The address by which other hosts reach this one, and its ports; default: that "
            "by which it reaches the head, and any port.",
        ),
    ] = "",
    interface: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="By which ranks of a gang on several hosts reach this one, as ib0; default: the "
            "one with the address of --listen.",
        ),
    ] = "",
    network: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help='Of hosts that a gang may span, where mesh.toml says pool.gang_scope = "network"; '
            "default: the head's.",
        ),
    ] = "",
    market: Annotated[str, typer.Option(help="reserved, spot or lent.")] = "reserved",
    memory: Annotated[
        float, typer.Option(metavar="GIB", min=0, help="That residents may take; 0: all.")
    ] = 0.0,
    disk: Annotated[
        float, typer.Option(metavar="GIB", min=0, help="That residents may take; 0: all.")
    ] = 0.0,
    cache: Annotated[
        float,
        typer.Option(
            metavar="GIB",
            min=0,
            help="Of disk, for weights that several processes here need; 0: each fetches them.",
        ),
    ] = 64.0,
    rate_up: RateUpOption = 0.0,
    rate_down: RateDownOption = 0.0,
    metrics: MetricsOption = "127.0.0.1:*",
    standby: Annotated[
        bool, typer.Option(help="Whether a planner may stand by here, for the head's.")
    ] = True,
    head: Annotated[
        str,
        typer.Option(
            metavar="NAME[:PORT]",
            help="By which this host reaches the head's gateway, from now on; default: as the "
            "token says, or as it did before.",
        ),
    ] = "",
    advertise: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="By which other hosts reach this one, as the name of a container whose address "
            "changes; default: the address of --listen.",
        ),
    ] = "",
    ephemeral: Annotated[
        bool,
        typer.Option(
            "--ephemeral",
            help="Leaves the mesh when it is told to end; the mesh forgets it when it stays away.",
        ),
    ] = False,
    foreground: ForegroundOption = False,
    drain_s: Annotated[
        float,
        typer.Option(
            "--drain-s",
            metavar="SECONDS",
            min=0,
            help="With --foreground: told to end, it first has everything move away from it, for "
            "so long at most; 0: it ends at once.",
        ),
    ] = DRAIN_TIMEOUT_S,
    health: HealthOption = "",
) -> None:
    """Joins a mesh that was started with `meshrl up --listen`: this host gives it its accelerators.

    A host that has joined comes back without a token: `meshrl join` in the same directory. What it
    gives stays as it was, but for what this command says of it.

    Examples:

        meshrl join join.token --workers 4

        meshrl join join.token --device cuda --workers 0 --listen 10.0.0.7:7100-7199

        meshrl join join.token --no-workers --services sandboxes

        MESHRL_JOIN=/run/secrets/join meshrl join --foreground
    """
    from meshrl.launch import host_capacity
    from meshrl.launch.foreground import run_foreground
    from meshrl.launch.hosts import host_join
    from meshrl.launch.hosts.host_offer import HostOffer

    sources = {name: context.get_parameter_source(name) for name in context.params}
    named = {name for name, source in sources.items() if source and source.name != "DEFAULT"}
    slots = 0 if no_workers and "workers" not in named else workers

    def coming() -> int:
        role = host_capacity.parse_host_capacity(slots, device, no_workers, services)
        offer = HostOffer(
            role.workers,
            role.device,
            listen,
            metrics,
            market,
            memory,
            disk,
            standby,
            interface,
            network,
            cache,
            role.accepted_services if services is not None else None,
            advertise,
            ephemeral,
            rate_up,
            rate_down,
            named,
        )
        return host_join.join_mesh(token, root, offer, foreground, head, health, drain_s)

    raise typer.Exit(run_foreground(coming) if foreground else coming())


@app.command(rich_help_panel="Hosts")
def leave(
    root: RootOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also when the head cannot be told.")
    ] = False,
) -> None:
    """Ends what runs on this host, in order; the mesh forgets it, and it the mesh.

    What was on it goes on elsewhere; `meshrl drain` at the head moves it away before.

    Example:

        meshrl leave
    """
    from meshrl.launch.hosts import host_leave

    host_leave.leave_mesh(root, force)


@app.command(rich_help_panel="Hosts")
def hosts(json: JsonOption = False, mesh: MeshOption = None) -> None:
    """Shows the hosts of a mesh: how each stands, what it has, how far it is.

    Example:

        meshrl hosts
    """
    from meshrl.commands import hosts as commands

    commands.print_hosts(mesh, json)


@app.command(rich_help_panel="Hosts")
def drain(
    host: HostArgument,
    off: Annotated[bool, typer.Option("--off", help="Uses it again.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Returns when nothing is on it.")] = False,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Waits no longer; default: for ever.")
    ] = None,
    json: JsonOption = False,
    mesh: MeshOption = None,
) -> None:
    """Moves everything away from a host, which nothing new is placed on: then it may leave.

    A job's core moves when a checkpoint has it; a shard when its groups are finished, of which it
    begins no more; a sandbox when no session is open; each after two minutes at the latest.

    Examples:

        meshrl drain gpu2 --wait

        meshrl drain gpu2 --off
    """
    from meshrl.commands import hosts as commands

    if off:
        commands.end_drain(host, json, mesh)
    else:
        commands.drain_host(host, wait, timeout, json, mesh)


keys = CommandGroup(
    invoke_without_command=True, help="Whose keys a mesh lets in; each process has its own."
)
app.add_typer(keys, name="keys", rich_help_panel="Hosts")


@keys.callback()
def _keys(context: typer.Context, json: JsonOption = False, mesh: MeshOption = None) -> None:
    """Shows whose keys a mesh lets in.

    Examples:

        meshrl keys

        meshrl keys revoke gpu2-1f3a9c
    """
    if context.invoked_subcommand is None:
        from meshrl.commands import keys as commands

        commands.print_keys(mesh, json)


@keys.command("list")
def list_(json: JsonOption = False, mesh: MeshOption = None) -> None:
    """Shows whose keys are let in.

    Example:

        meshrl keys list
    """
    from meshrl.commands import keys as commands

    commands.print_keys(mesh, json)


@keys.command()
def revoke(
    host_or_key: Annotated[
        str,
        typer.Argument(
            metavar="HOST_OR_KEY",
            help="As `meshrl keys` shows it, or how it begins: 8 digits of a key at least.",
        ),
    ],
    mesh: MeshOption = None,
) -> None:
    """Lets a host in no more, at once, with all its processes; or one process' key.

    Example:

        meshrl keys revoke gpu2-1f3a9c
    """
    from meshrl.commands import keys as commands

    commands.revoke_host_or_key(host_or_key, mesh)
