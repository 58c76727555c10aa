"""Commands that observe a run or a mesh, and `cancel`, which stops a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshrl.cli.arguments import (
    JsonOption,
    MeshOption,
    RunOrJobArgument,
    RunOrMeshArgument,
    RunOrUrlArgument,
    TokenOption,
    app,
)


@app.command(rich_help_panel="Runs")
def watch(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]",
            help="A run directory, or a job of the mesh; default: the mesh's current jobs.",
        ),
    ] = None,
    mesh: MeshOption = None,
    token: TokenOption = None,
) -> None:
    """Show the live view of a run that was submitted, or that runs in another terminal.

    The view changes nothing; Ctrl-C ends it and leaves the job running. Exit status at the end of
    the run: 0 finished, 1 failed, 3 stopped before its end; 130 after Ctrl-C.

    Example:

        meshrl watch runs/calculator
    """
    if token and run and not mesh:
        from meshrl.commands import token_jobs

        raise typer.Exit(token_jobs.watch_job(token, str(run)))
    from meshrl.runs.monitoring import run_watch

    raise typer.Exit(run_watch.watch_run(run, mesh))


@app.command(rich_help_panel="Runs")
def wait(
    run: RunOrJobArgument,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Give up after this time; default: never."),
    ] = None,
    json: JsonOption = False,
    mesh: MeshOption = None,
    token: TokenOption = None,
) -> None:
    """Wait until a run is over and its report and model are written; print its outcome.

    Exit status: 0 finished, 1 failed, 3 stopped before its end, 124 --timeout.

    Example:

        meshrl wait runs/calculator --timeout 3600 && meshrl audit runs/calculator
    """
    if token and not mesh:
        from meshrl.commands import token_jobs

        raise typer.Exit(token_jobs.wait_for_job(token, str(run), timeout, json))
    from meshrl.runs import completion

    raise typer.Exit(completion.wait_for_run(run, mesh, timeout, json))


@app.command(rich_help_panel="Runs")
def cancel(
    run: RunOrJobArgument,
    json: JsonOption = False,
    mesh: MeshOption = None,
    token: TokenOption = None,
) -> None:
    """Stop a job of a mesh, or the job of a `meshrl run`, cleanly.

    The mesh starts its next job. Results and the last checkpoint stay, and `meshrl resume`
    continues from there. Exit status 1: the job has already finished or failed.

    Example:

        meshrl cancel runs/calculator
    """
    if token and not mesh:
        from meshrl.commands import token_jobs

        raise typer.Exit(token_jobs.cancel_job(token, str(run), json))
    from meshrl.runs import completion

    raise typer.Exit(completion.cancel_run(run, mesh, json))


@app.command(rich_help_panel="Runs")
def samples(
    run: RunOrMeshArgument = None,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Only samples of step N and its evaluations.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Highest rewards first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest rewards first.")] = False,
    failed: Annotated[
        bool, typer.Option("--failed", help="Only samples without a reward.")
    ] = False,
    limit: Annotated[int, typer.Option("-n", metavar="N", help="Number of samples.")] = 5,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Wait for more.")] = False,
    json: JsonOption = False,
    mesh: MeshOption = None,
) -> None:
    """Show trajectories: the model's text, its tool calls, its reward, its outcome.

    A run saves a few of each step and each evaluation, including the best, the worst and the
    failed ones. The command also works during a run.

    Examples:

        meshrl samples runs/calculator --step 12 --best

        meshrl samples runs/calculator --failed --follow
    """
    from meshrl.directory.command_target import resolve_run
    from meshrl.view.live import sample_printer as reading

    selected = [name for name, on in (("best", best), ("worst", worst), ("failed", failed)) if on]
    if len(selected) > 1:
        raise typer.BadParameter(f"--{selected[0]} and --{selected[1]} exclude each other")
    directory = resolve_run(run, mesh).directory
    order = selected[0] if selected else ""
    reading.print_samples(directory, step, order, limit, follow, json)


@app.command(rich_help_panel="Runs")
def audit(run: RunOrUrlArgument = None, json: JsonOption = False, mesh: MeshOption = None) -> None:
    """Account for every trajectory of a run, from its ledger and events alone.

    For a mesh, audit its current or last job. Exit status 1: a trajectory is lost or was
    trained twice.

    Example:

        meshrl audit runs/calculator
    """
    from meshrl.directory.command_target import resolve_run
    from meshrl.view.recording import audit as auditing

    raise typer.Exit(auditing.print_audit(resolve_run(run, mesh).directory, json))


@app.command(rich_help_panel="Runs")
def report(
    run: RunOrUrlArgument = None,
    png: Annotated[
        Path | None,
        typer.Option("--png", metavar="DIR", help="Write each figure to DIR as a PNG file."),
    ] = None,
    mesh: MeshOption = None,
) -> None:
    """Rebuild the report of a run that is over; with --png write its figures, also during a run.

    PNG files require matplotlib: pip install 'meshrl[plots]'.

    Example:

        meshrl report runs/calculator --png figures
    """
    from meshrl.directory.command_target import resolve_run
    from meshrl.view.report import redraw

    redraw.redraw_report(resolve_run(run, mesh).directory, png)


@app.command(rich_help_panel="Runs")
def trace(
    run: RunOrUrlArgument = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: RUN/trace.json.")
    ] = None,
    mesh: MeshOption = None,
) -> None:
    """Write a timeline of a run as a trace for https://ui.perfetto.dev, also during the run.

    It has trajectories (queue, prefill, decode, tool, reward), the trainer's steps (pack, train,
    sync, checkpoint), weight updates of engines, and the job and role of each worker with every
    move.

    Example:

        meshrl trace runs/calculator --out calculator-trace.json
    """
    from meshrl.directory.command_target import resolve_run
    from meshrl.view.trace import trace_writer

    trace_writer.export_trace(resolve_run(run, mesh).directory, out)


@app.command(rich_help_panel="Meshes")
def status(
    run: RunOrMeshArgument = None,
    stalled: Annotated[
        bool,
        typer.Option(
            "--stalled", help="Print which process waits, and which process is the cause."
        ),
    ] = False,
    why: Annotated[
        str,
        typer.Option(
            metavar="JOB|GANG", help="Print the last decisions about it, with rule and figures."
        ),
    ] = "",
    json: JsonOption = False,
    mesh: MeshOption = None,
    token: TokenOption = None,
) -> None:
    """Show jobs, services and gangs, or with --stalled the cause of each stall.

    For a run that is over, show its outcome and the command that resumes it.

    Examples:

        meshrl status

        meshrl status runs/calculator

        meshrl status --stalled --json

        meshrl status --why calculator
    """
    if token and not mesh:
        from meshrl.commands import token_jobs

        token_jobs.show_status(token, None if run is None else str(run), json)
        return
    from meshrl.commands import status as commands

    if why:
        commands.explain_decisions(why, run or mesh, json)
    elif stalled:
        commands.print_stalls(run, mesh, json)
    else:
        commands.print_status(run, mesh, json)


@app.command(rich_help_panel="Meshes")
def top(
    run: RunOrMeshArgument = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    json: JsonOption = False,
    mesh: MeshOption = None,
    token: TokenOption = None,
) -> None:
    """Show a live view of a mesh: jobs, rates, moves of workers, gangs and their instances.

    The view changes nothing; Ctrl-C ends it. Without a terminal it prints one frame. With a token
    it shows the jobs of that token.

    Examples:

        meshrl top

        meshrl top runs/calculator --once

        meshrl top --json
    """
    from meshrl.runs.monitoring import mesh_top as showing

    if token and not mesh:
        raise typer.Exit(showing.show_top_by_token(token, once, json))
    raise typer.Exit(showing.show_top(run, mesh, once, json))


@app.command(rich_help_panel="Meshes")
def profiles(
    run: RunOrMeshArgument = None,
    match: Annotated[
        str,
        typer.Option(
            metavar="TEXT", help="Only kinds with this text, such as a role, model or accelerator."
        ),
    ] = "",
    json: JsonOption = False,
    mesh: MeshOption = None,
) -> None:
    """Show the measured durations, gaps and bytes of functions, by kind of instance.

    A mesh keeps them across its jobs: time slices of a new job start from the profile of its kind.
    The command also works for a mesh that is down.

    Examples:

        meshrl profiles

        meshrl profiles --match engine --json
    """
    from meshrl.commands import profiles as commands

    commands.print_profiles(run, mesh, match, json)


@app.command(rich_help_panel="Help")
def logs(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] [SERVICE]",
            help="A run or mesh directory, and a service such as rollout/calc/0; default: all logs "
            "of the mesh started last.",
        ),
    ] = None,
    lines: Annotated[int, typer.Option("-n", "--lines", help="Number of lines of each log.")] = 20,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Wait for more.")] = False,
    list_only: Annotated[bool, typer.Option("--list", help="List the logs of each host.")] = False,
    mesh: MeshOption = None,
) -> None:
    """Print the logs of a running or stopped mesh; while it runs, also the logs of its other hosts.

    Examples:

        meshrl logs rollout/calc/0 -f

        meshrl logs runs/calculator trainer/calculator
    """
    from meshrl.commands import logs as printing

    printing.print_logs(names or [], mesh, lines, follow, list_only)
