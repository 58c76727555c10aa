"""Commands for meshes that stay up, and for the host they are on."""

from __future__ import annotations

from pathlib import Path
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
    TokenOption,
    app,
)


@app.command(rich_help_panel="Meshes")
def up(
    workers: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="0: as many as there are GPUs, or 3 CPU slots."),
    ] = 0,
    device: Annotated[str, typer.Option(help="What workers are: cpu, or cuda.")] = "cpu",
    no_workers: NoWorkersOption = False,
    services: ServicesOption = None,
    root: RootOption = None,
    bind: Annotated[str, typer.Option(help="Where every process listens.")] = "tcp://127.0.0.1:*",
    advertise: Annotated[str, typer.Option(help="What it tells others; default: `bind`.")] = "",
    metrics: MetricsOption = "127.0.0.1:*",
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A mesh.toml: how the planner shares the mesh between jobs."
        ),
    ] = None,
    gateway: Annotated[
        str | None,
        typer.Option(
            help="Where holders of tokens are let in, as tcp://0.0.0.0:7700; or off. Default: "
            "this host alone, or with --listen there.",
        ),
    ] = None,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST[:LOW-HIGH]",
            help="Lets other hosts join: the address by which they reach this one, and its ports.",
        ),
    ] = "",
    resume: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Goes on with the jobs of a mesh whose head is gone, from the copy that it kept "
            "at this URL (durable.url of its mesh.toml).",
        ),
    ] = "",
    encrypt: Annotated[
        bool | None,
        typer.Option(
            "--encrypt/--no-encrypt",
            help="Seal weights, files and gradients between hosts, too; default: with --listen.",
        ),
    ] = None,
    rate_up: RateUpOption = 0.0,
    rate_down: RateDownOption = 0.0,
    foreground: ForegroundOption = False,
    health: HealthOption = "",
    secrets: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The head.json of `meshrl secrets`, whose tokens are good here; taken over at the "
            "first start.",
        ),
    ] = None,
) -> None:
    """Starts a mesh in the background, for jobs that are submitted to it.

    With --listen it writes a token by which another host joins, with `meshrl join`: every
    connection is encrypted then.

    $MESHRL_REDIS_URL names a Redis to use instead of an embedded one, or a file with its URL.

    Examples:

        meshrl up --workers 4

        meshrl up --listen 10.0.0.5:7100-7199

        meshrl submit examples/calculator.toml

        meshrl down
    """
    from meshrl.launch import host_capacity, up_down
    from meshrl.launch.foreground import run_foreground
    from meshrl.launch.head.mesh_shape import MeshShape
    from meshrl.launch.hosts.host_offer import MB

    def starting() -> int:
        role = host_capacity.parse_host_capacity(
            workers, device, no_workers, services, host_capacity.DEFAULT_HEAD_WORKERS
        )
        shape = MeshShape(
            workers=role.workers,
            device=role.device,
            bind=bind,
            advertise=advertise,
            metrics=metrics,
            listen=listen,
            encrypt_bulk=encrypt,
            accepted_services=role.accepted_services,
            upload_bytes_per_s=int(rate_up * MB),
            download_bytes_per_s=int(rate_down * MB),
        )
        options = up_down.UpOptions(config, gateway, resume, health, foreground, secrets)
        return up_down.up(root, shape, options)

    raise typer.Exit(run_foreground(starting) if foreground else starting())


@app.command(rich_help_panel="Meshes")
def down(mesh: MeshOption = None) -> None:
    """Stops a mesh with everything it started.

    Example:

        meshrl down
    """
    from meshrl.launch import up_down

    up_down.down(mesh)


@app.command(rich_help_panel="Meshes")
def workers(json: JsonOption = False, mesh: MeshOption = None) -> None:
    """Shows each worker with its accelerator, its role and the role it is to have.

    Example:

        meshrl workers
    """
    from meshrl.commands import status as commands

    commands.print_workers(mesh, json)


@app.command(rich_help_panel="Meshes")
def move(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="As in `meshrl workers`: w1.")],
    role: Annotated[str, typer.Argument(metavar="ROLE", help="rollout, training or idle.")],
    job: Annotated[
        str, typer.Option(metavar="JOB", help="Of which job; default: the only one.")
    ] = "",
    mesh: MeshOption = None,
) -> None:
    """Gives a worker another role and keeps it there; the others go on.

    Example:

        meshrl move w1 training
    """
    from meshrl.client.client import run_request

    print(run_request(lambda client: client.move(worker, role, job), mesh))


@app.command(rich_help_panel="Meshes")
def plan(
    explain: Annotated[
        bool, typer.Option("--explain", help="What would be decided of it, with rule and figures.")
    ] = False,
    snapshot: Annotated[
        Path | None,
        typer.Option(
            "--snapshot", metavar="FILE", help="A saved snapshot; default: the mesh as it is."
        ),
    ] = None,
    look: Annotated[Path | None, typer.Option(hidden=True)] = None,
    json: JsonOption = False,
    mesh: MeshOption = None,
) -> None:
    """Prints what the planner decides from, as JSON, or what it would decide. Changes nothing.

    Examples:

        meshrl plan --explain

        meshrl plan > pool.json; meshrl plan --explain --snapshot pool.json
    """
    from meshrl.commands import planning

    if look is not None:
        typer.echo("--look is deprecated: use --snapshot", err=True)
    raise typer.Exit(planning.print_plan(snapshot or look, explain, json, mesh))


@app.command(rich_help_panel="Meshes")
def delete(
    job: Annotated[str, typer.Argument(metavar="JOB", help="As in `meshrl status`.")],
    mesh: MeshOption = None,
    token: TokenOption = None,
) -> None:
    """Removes a job that has ended from the mesh's records. Its run directory stays.

    Weights that lie in the mesh's store alone go with it; checkpoints and exports stay.

    Example:

        meshrl delete calculator
    """
    from meshrl.client.client import run_request

    run_request(lambda client: client.delete(job), mesh, token)
    print(f"{job} is deleted; its run directory stays")


@app.command(rich_help_panel="Help")
def doctor() -> None:
    """Checks what this machine offers a mesh; each line that is not ok says the fix.

    Example:

        meshrl doctor
    """
    from meshrl.commands import doctor as checks

    raise typer.Exit(checks.print_findings())


engine = CommandGroup(no_args_is_help=True, help="Engines with an interpreter of their own.")
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
    from meshrl.commands import engines

    print(engines.install_engine(name, directory))


@app.command(rich_help_panel="Meshes")
def simulate(
    scenario: Annotated[
        str, typer.Argument(metavar="SCENARIO", help="A TOML file, or one of those that are here.")
    ] = "",
    from_: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="In place of a scenario: as this run was."),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Compares the scenario with itself, so changed."),
    ] = None,
    set: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Changes it in all arms.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Writes plots there, HTML and PNG.")
    ] = None,
) -> None:
    """Runs a scenario on a simulated cluster, by the decisions that run a mesh.

    Examples:

        meshrl simulate agentic

        meshrl simulate MY.toml --what-if hosts.H100.count=4

        meshrl simulate --from runs/calculator --what-if hosts.accelerators=6

        meshrl simulate validity

        meshrl simulate cake

        meshrl simulate zebra
    """
    from meshrl.commands import simulation

    raise typer.Exit(simulation.run_simulation(scenario, what_if or [], set or [], out, from_))
