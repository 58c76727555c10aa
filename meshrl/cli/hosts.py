"""Commands for meshes of several hosts: join, drain, leave, and keys."""

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

DRAIN_TIMEOUT_S = 60.0  # a job's core moves once a checkpoint covers it
HostArgument = Annotated[
    str,
    typer.Argument(
        metavar="HOST", help="A host that `meshrl hosts` lists, or a prefix of its name."
    ),
]


@app.command(rich_help_panel="Hosts")
def join(
    context: typer.Context,
    token: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE|URL|-]",
            help="Join token of the head: its file, a URL of it, or - for standard input; "
            "default: $MESHRL_JOIN, the token or its file.",
        ),
    ] = None,
    root: RootOption = None,
    workers: Annotated[
        int, typer.Option(metavar="N", min=0, help="Number of workers; 0 with cuda: one per GPU.")
    ] = 1,
    device: Annotated[str, typer.Option(help="Device of the workers: cpu or cuda.")] = "cpu",
    no_workers: NoWorkersOption = False,
    services: ServicesOption = None,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST[:LOW-HIGH]",
            help="Address and ports by which other hosts reach this one; default: the address that "
            "reaches the head, and any port.",
        ),
    ] = "",
    interface: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Network interface for gangs that span hosts, such as ib0; default: the interface "
            "with the address of --listen.",
        ),
    ] = "",
    network: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help='Network whose hosts a gang may span with pool.gang_scope = "network"; '
            "default: the head's network.",
        ),
    ] = "",
    market: Annotated[str, typer.Option(help="Market: reserved, spot or lent.")] = "reserved",
    price: Annotated[
        float,
        typer.Option(
            min=0,
            help="Price of an hour of each worker; default: that of its market in mesh.toml.",
        ),
    ] = 0.0,
    notice: Annotated[
        str,
        typer.Option(
            metavar="SOURCE",
            help="Source of preemption notices: ec2, gcp, azure or file:PATH; default: none.",
        ),
    ] = "",
    memory: Annotated[
        float, typer.Option(metavar="GIB", min=0, help="Memory that instances may use; 0: all.")
    ] = 0.0,
    disk: Annotated[
        float, typer.Option(metavar="GIB", min=0, help="Disk that instances may use; 0: all.")
    ] = 0.0,
    cache: Annotated[
        float,
        typer.Option(
            metavar="GIB",
            min=0,
            help="Disk for weights that several processes share; 0: each process fetches them.",
        ),
    ] = 64.0,
    rate_up: RateUpOption = 0.0,
    rate_down: RateDownOption = 0.0,
    metrics: MetricsOption = "127.0.0.1:*",
    standby: Annotated[
        bool, typer.Option(help="Allow a standby of the head's planner on this host.")
    ] = True,
    head: Annotated[
        str,
        typer.Option(
            metavar="NAME[:PORT]",
            help="Name by which this host reaches the head's gateway from now on; default: the "
            "last name, or the name in the token.",
        ),
    ] = "",
    advertise: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Name by which other hosts reach this one, for a container whose address changes; "
            "default: the address of --listen.",
        ),
    ] = "",
    ephemeral: Annotated[
        bool,
        typer.Option(
            "--ephemeral",
            help="Leave the mesh when stopped; the mesh removes the host when it stays away.",
        ),
    ] = False,
    foreground: ForegroundOption = False,
    drain_s: Annotated[
        float,
        typer.Option(
            "--drain-s",
            metavar="SECONDS",
            min=0,
            help="With --foreground: when stopped, first drain this host, for at most this time; "
            "0: stop at once.",
        ),
    ] = DRAIN_TIMEOUT_S,
    grace_s: Annotated[
        float,
        typer.Option(
            "--grace-s",
            metavar="SECONDS",
            min=0,
            help="Time from the stop order until the platform kills this host, which limits "
            "--drain-s; default: not known.",
        ),
    ] = 0.0,
    health: HealthOption = "",
) -> None:
    """Join a mesh that `meshrl up --listen` started, and contribute this host's accelerators.

    To rejoin later, run `meshrl join` in the same directory without a token. Options of an earlier
    join stay in force unless this command sets them.

    Examples:

        meshrl join join.token --workers 4

        meshrl join join.token --device cuda --workers 0 --listen 10.0.0.7:7100-7199

        meshrl join join.token --no-workers --services sandboxes

        MESHRL_JOIN=/run/secrets/join meshrl join --foreground
    """
    from meshrl.launch import host_capacity
    from meshrl.launch.foreground import run_foreground
    from meshrl.launch.hosts import host_join
    from meshrl.launch.hosts.host_drain import limit_drain
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
            price,
            notice,
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
        return host_join.join_mesh(
            token, root, offer, foreground, head, health, limit_drain(drain_s, grace_s)
        )

    raise typer.Exit(run_foreground(coming) if foreground else coming())


@app.command(rich_help_panel="Hosts")
def leave(
    root: RootOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="Leave even if the head is unreachable.")
    ] = False,
) -> None:
    """Stop the processes of this host in order, and remove it from its mesh.

    Its work continues on other hosts. `meshrl drain` at the head moves that work away first.

    Example:

        meshrl leave
    """
    from meshrl.launch.hosts import host_leave

    host_leave.leave_mesh(root, force)


@app.command(rich_help_panel="Hosts")
def hosts(json: JsonOption = False, mesh: MeshOption = None) -> None:
    """Show the hosts of a mesh with state, resources and network latency.

    Example:

        meshrl hosts
    """
    from meshrl.commands import hosts as commands

    commands.print_hosts(mesh, json)


@app.command(rich_help_panel="Hosts")
def drain(
    host: HostArgument,
    off: Annotated[bool, typer.Option("--off", help="End the drain: use the host again.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the host is empty.")] = False,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Limit of --wait; default: none.")
    ] = None,
    json: JsonOption = False,
    mesh: MeshOption = None,
) -> None:
    """Move everything away from a host and place nothing new on it, so that it may leave.

    A job's core moves once a checkpoint covers it. A shard starts no more groups, and moves once
    its groups are finished. A sandbox moves once no session is open. Each moves within two minutes.

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
    invoke_without_command=True,
    help="List and revoke the keys that a mesh admits; each process has its own.",
)
app.add_typer(keys, name="keys", rich_help_panel="Hosts")


@keys.callback()
def _keys(context: typer.Context, json: JsonOption = False, mesh: MeshOption = None) -> None:
    """Show the keys that a mesh admits.

    Examples:

        meshrl keys

        meshrl keys revoke gpu2-1f3a9c
    """
    if context.invoked_subcommand is None:
        from meshrl.commands import keys as commands

        commands.print_keys(mesh, json)


@keys.command("list")
def list_(json: JsonOption = False, mesh: MeshOption = None) -> None:
    """Show the keys that a mesh admits.

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
            help="A host or key that `meshrl keys` lists, or a prefix (8 digits of a key or more).",
        ),
    ],
    mesh: MeshOption = None,
) -> None:
    """Revoke a host with all its processes at once, or the key of one process.

    Example:

        meshrl keys revoke gpu2-1f3a9c
    """
    from meshrl.commands import keys as commands

    commands.revoke_host_or_key(host_or_key, mesh)
