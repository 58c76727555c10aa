"""Commands for long-lived meshes, and for their host."""

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

MOVE_ROLES = ("rollout", "training", "idle")  # roles that `meshrl move` accepts


@app.command(rich_help_panel="Meshes")
def up(
    workers: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Number of workers; 0: one per GPU, or 3 CPU slots."),
    ] = 0,
    device: Annotated[str, typer.Option(help="Device of the workers: cpu or cuda.")] = "cpu",
    no_workers: NoWorkersOption = False,
    services: ServicesOption = None,
    root: RootOption = None,
    bind: Annotated[
        str, typer.Option(help="Address that processes listen on.")
    ] = "tcp://127.0.0.1:*",
    advertise: Annotated[
        str, typer.Option(help="Address that processes publish; default: --bind.")
    ] = "",
    metrics: MetricsOption = "127.0.0.1:*",
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A mesh.toml, which sets how the planner shares the mesh between jobs.",
        ),
    ] = None,
    gateway: Annotated[
        str | None,
        typer.Option(
            help="Address for clients with tokens, such as tcp://0.0.0.0:7700; or off. Default: "
            "only this host, or the address of --listen."
        ),
    ] = None,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST[:LOW-HIGH]",
            help="Let other hosts join: address and ports by which they reach this one.",
        ),
    ] = "",
    resume: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Continue the jobs of a mesh whose head is lost, from its copy at this URL "
            "(durable.url of its mesh.toml).",
        ),
    ] = "",
    encrypt: Annotated[
        bool | None,
        typer.Option(
            "--encrypt/--no-encrypt",
            help="Also encrypt weights, files and gradients between hosts; default: with --listen.",
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
            help="The head.json of `meshrl secrets`, whose tokens this mesh accepts; read at the "
            "first start only.",
        ),
    ] = None,
) -> None:
    """Start a mesh in the background, for jobs that are submitted to it.

    With --listen, write a token with which another host joins (`meshrl join`), and encrypt every
    connection.

    $MESHRL_REDIS_URL is the URL of a Redis that replaces the embedded one, or a file with the URL.

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
    """Stop a mesh and every process that it started.

    Example:

        meshrl down
    """
    from meshrl.launch import up_down

    up_down.down(mesh)


@app.command(rich_help_panel="Meshes")
def workers(json: JsonOption = False, mesh: MeshOption = None) -> None:
    """Show each worker with its accelerator, its role and its desired role.

    Example:

        meshrl workers
    """
    from meshrl.commands import status as commands

    commands.print_workers(mesh, json)


@app.command(rich_help_panel="Meshes")
def move(
    worker: Annotated[
        str,
        typer.Argument(metavar="WORKER", help="A worker that `meshrl workers` lists, such as w1."),
    ],
    role: Annotated[str, typer.Argument(metavar="ROLE", help="rollout, training or idle.")],
    job: Annotated[
        str, typer.Option(metavar="JOB", help="Job of the role; default: the only job.")
    ] = "",
    mesh: MeshOption = None,
) -> None:
    """Move a worker to another role and keep it there; other workers continue.

    Example:

        meshrl move w1 training
    """
    from meshrl.client.client import run_request
    from meshrl.common.base.errors import ConfigError

    if role not in MOVE_ROLES:
        raise ConfigError(f"{role!r} is no role of a worker", fix=f"Choose {', '.join(MOVE_ROLES)}")
    print(run_request(lambda client: client.move(worker, role, job), mesh))


@app.command(rich_help_panel="Meshes")
def place(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Job whose core is placed.")],
    partner: Annotated[
        str, typer.Option("--with", metavar="JOB", help="Job whose gang it shares.")
    ] = "",
    apart: Annotated[bool, typer.Option("--apart", help="End the sharing.")] = False,
    mesh: MeshOption = None,
) -> None:
    """Let a job share the gang of another job by time slices, or place it apart again.

    Example:

        meshrl place second --with first
    """
    from meshrl.client.client import run_request
    from meshrl.common.base.errors import ConfigError

    if bool(partner) == apart:
        raise ConfigError("place needs either --with JOB or --apart", where="meshrl place")
    print(run_request(lambda client: client.place(job, partner), mesh))


@app.command(rich_help_panel="Meshes")
def plan(
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Print the planner's decisions, with rule and figures."),
    ] = False,
    snapshot: Annotated[
        Path | None,
        typer.Option(
            "--snapshot", metavar="FILE", help="A saved snapshot; default: the mesh's state."
        ),
    ] = None,
    look: Annotated[Path | None, typer.Option(hidden=True)] = None,
    json: JsonOption = False,
    mesh: MeshOption = None,
) -> None:
    """Print the planner's input as JSON, or with --explain its decisions. This changes nothing.

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
    job: Annotated[str, typer.Argument(metavar="JOB", help="A job that `meshrl status` lists.")],
    mesh: MeshOption = None,
    token: TokenOption = None,
) -> None:
    """Remove a job that has ended from the mesh's records. Its run directory stays.

    Weights that only the mesh's store has are deleted too; checkpoints and exports stay.

    Example:

        meshrl delete calculator
    """
    from meshrl.client.client import run_request

    run_request(lambda client: client.delete(job), mesh, token)
    print(f"{job} is deleted; its run directory stays")


@app.command(rich_help_panel="Help")
def doctor(
    job: Annotated[
        Path | None,
        typer.Argument(metavar="[JOB]", help="Job file, whose memory is printed and checked."),
    ] = None,
    accelerator: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="With JOB: check for accelerators of this kind (H200) or size in GiB (80).",
        ),
    ] = "",
    require: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SUBJECT",
            help="Fail if this line is not ok, such as sglang or 'cuda kernels'. Repeatable.",
        ),
    ] = None,
) -> None:
    """Check this machine as a host of a mesh; print a fix for each problem.

    With a job, also print the memory of its processes by kind, and check that it fits.

    Examples:

        meshrl doctor

        meshrl doctor --require sglang

        meshrl doctor job.toml --accelerator H200
    """
    from meshrl.commands import doctor as checks

    if accelerator and job is None:
        raise typer.BadParameter("--accelerator belongs to a job file")
    status = checks.print_findings(require or ())
    if job is not None:
        status = checks.check_job_memory(job, accelerator) or status
    raise typer.Exit(status)


engine = CommandGroup(
    no_args_is_help=True, help="Install engines that need their own Python interpreter."
)
app.add_typer(engine, name="engine", rich_help_panel="Help")


@engine.callback()
def _engine() -> None:
    """Install engines that need their own Python interpreter."""


@engine.command()
def install(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Engine: sglang.", show_default=False)
    ],
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", metavar="DIR", help="Default: below $MESHRL_ENGINES or ~/.cache/meshrl."
        ),
    ] = None,
) -> None:
    """Build the environment of an engine, and print its interpreter.

    Jobs find the default directory. With --dir, set `rollout.sglang_python` to the interpreter.

    Example:

        meshrl engine install sglang
    """
    from meshrl.commands import engines

    print(engines.install_engine(name, directory))


@app.command(rich_help_panel="Meshes")
def simulate(
    scenario: Annotated[
        str, typer.Argument(metavar="SCENARIO", help="A TOML file or a built-in scenario.")
    ] = "",
    from_: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="Simulate this run instead of a scenario."),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="Compare the scenario with one that has this change."
        ),
    ] = None,
    set: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Change a key in all arms.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write plots to DIR, as HTML and PNG.")
    ] = None,
) -> None:
    """Run a scenario on a simulated cluster, with the planner of a real mesh.

    Built-in scenarios are agentic, cake, drift, libra, scale, spot, validity and zebra; without a
    scenario, they are listed with their titles. Progress goes to standard error.

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
