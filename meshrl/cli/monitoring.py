"""Commands that look at a run or a mesh, and the one that stops a run."""

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
            help="A run directory, or a job of the mesh; default: what the mesh works on.",
        ),
    ] = None,
    mesh: MeshOption = None,
    token: TokenOption = None,
) -> None:
    """Shows a run as `meshrl run` does: one that was submitted, or is run in another terminal.

    Changes nothing; Ctrl-C ends the view and leaves the job running. Exit status, when the run is
    over: 0 it has finished, 1 it has failed, 3 it was stopped before its end; 130 after Ctrl-C.

    Example:

        meshrl watch runs/calculator
    """
    if token and run and not mesh:
        from meshrl.commands import token_jobs

        raise typer.Exit(token_jobs.watch_job(token, str(run)))
    from meshrl.run.monitoring import run_watch

    raise typer.Exit(run_watch.watch_run(run, mesh))


@app.command(rich_help_panel="Runs")
def wait(
    run: RunOrJobArgument,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Gives up after that; default: never.")
    ] = None,
    json: JsonOption = False,
    mesh: MeshOption = None,
    token: TokenOption = None,
) -> None:
    """Returns when a run is over and its report and model are written, and says how it ended.

    Exit status: 0 it has finished, 1 it has failed, 3 it was stopped before its end, 124 --timeout.

    Example:

        meshrl wait runs/calculator --timeout 3600 && meshrl audit runs/calculator
    """
    if token and not mesh:
        from meshrl.commands import token_jobs

        raise typer.Exit(token_jobs.wait_for_job(token, str(run), timeout, json))
    from meshrl.run import completion

    raise typer.Exit(completion.wait_for_run(run, mesh, timeout, json))


@app.command(rich_help_panel="Runs")
def cancel(
    run: RunOrJobArgument,
    json: JsonOption = False,
    mesh: MeshOption = None,
    token: TokenOption = None,
) -> None:
    """Ends a job cleanly: one of a mesh, which takes up the next one, or that of a `meshrl run`.

    What it has made stays, its last checkpoint too, and `meshrl resume` goes on from there. Exits 1
    when the job has finished or failed already.

    Example:

        meshrl cancel runs/calculator
    """
    if token and not mesh:
        from meshrl.commands import token_jobs

        raise typer.Exit(token_jobs.cancel_job(token, str(run), json))
    from meshrl.run import completion

    raise typer.Exit(completion.cancel_run(run, mesh, json))


@app.command(rich_help_panel="Runs")
def samples(
    run: RunOrMeshArgument = None,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Only those of a step, evaluations of it too.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Those with the highest reward.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Those with the lowest.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Those without a reward.")] = False,
    limit: Annotated[int, typer.Option("-n", metavar="N", help="How many.")] = 5,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Waits for more.")] = False,
    json: JsonOption = False,
    mesh: MeshOption = None,
) -> None:
    """Shows trajectories: what the model said, its tools, its reward, how it ended.

    A run keeps a few of each step and of each evaluation, among them the best, the worst and those
    that failed; also while it goes on.

    Examples:

        meshrl samples runs/calculator --step 12 --best

        meshrl samples runs/calculator --failed --follow
    """
    from meshrl.directory.command_target import resolve_run
    from meshrl.view.live import sample_printer as reading

    asked = [name for name, on in (("best", best), ("worst", worst), ("failed", failed)) if on]
    if len(asked) > 1:
        raise typer.BadParameter(f"--{asked[0]} and --{asked[1]} exclude each other")
    directory = resolve_run(run, mesh).directory
    order = asked[0] if asked else ""
    reading.print_samples(directory, step, order, limit, follow, json)


@app.command(rich_help_panel="Runs")
def audit(run: RunOrUrlArgument = None, json: JsonOption = False, mesh: MeshOption = None) -> None:
    """Accounts for every trajectory of a run, from its ledger and events alone.

    Of a mesh: of the job that it works on, or did last. Exits 1 when a trajectory is lost or was
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
        typer.Option("--png", metavar="DIR", help="Writes each figure as a PNG file to DIR."),
    ] = None,
    mesh: MeshOption = None,
) -> None:
    """Writes the report of a run that is over anew, or with --png its figures, also while it goes
    on.

    PNG files take matplotlib: pip install 'meshrl[plots]'.

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
    """Writes where a run's time goes as a trace for https://ui.perfetto.dev, also while it goes on.

    Trajectories (queue, prefill, decode, tool, reward), the trainer's steps (pack, train, sync,
    checkpoint), engines' new weights, and who is on which worker in which role, with every move.

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
        bool, typer.Option("--stalled", help="Names who waits and which process is the cause.")
    ] = False,
    why: Annotated[
        str,
        typer.Option(
            metavar="JOB|GANG", help="What was decided about it last, with rule and figures."
        ),
    ] = "",
    json: JsonOption = False,
    mesh: MeshOption = None,
    token: TokenOption = None,
) -> None:
    """Shows jobs, services and gangs, or with --stalled what holds them up.

    Of a run that is over: how it ended, and the command that goes on.

    Example:

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
    once: Annotated[bool, typer.Option("--once", help="Prints one frame, and ends.")] = False,
    json: JsonOption = False,
    mesh: MeshOption = None,
    token: TokenOption = None,
) -> None:
    """Shows a mesh while it works: jobs, rates, moves of workers, gangs and what resides on them.

    Changes nothing; Ctrl-C ends it. Without a terminal it prints one frame. With a token: its jobs.

    Examples:

        meshrl top

        meshrl top runs/calculator --once

        meshrl top --json
    """
    from meshrl.run.monitoring import mesh_top as showing

    if token and not mesh:
        raise typer.Exit(showing.show_top_by_token(token, once, json))
    raise typer.Exit(showing.show_top(run, mesh, once, json))


@app.command(rich_help_panel="Help")
def logs(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] [SERVICE]",
            help="A run or mesh directory, and a service as in rollout/calc/0; default: all logs "
            "of the mesh started last.",
        ),
    ] = None,
    lines: Annotated[int, typer.Option("-n", "--lines", help="How many, of each log.")] = 20,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Waits for more.")] = False,
    list_only: Annotated[
        bool, typer.Option("--list", help="Says which logs there are on which host.")
    ] = False,
    mesh: MeshOption = None,
) -> None:
    """Prints the logs of a mesh, also of one that has stopped. While it runs, also those of its
    other hosts.

    Example:

        meshrl logs rollout/calc/0 -f

        meshrl logs runs/calculator trainer/calculator
    """
    from meshrl.commands import logs as printing

    printing.print_logs(names or [], mesh, lines, follow, list_only)
