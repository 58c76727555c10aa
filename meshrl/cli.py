"""The command line: the arguments and output of each command. What a command does is imported when
it runs.

Nothing heavy is imported here, so that `meshrl --help` and errors in a job file come at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="meshrl",
    epilog="A first run: meshrl init mygame; meshrl run mygame/job.toml",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Job = Annotated[Path, typer.Argument(metavar="JOB", help="A job file (TOML).", show_default=False)]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, as in runs/calculator.")]
RunOrJob = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run directory, or a job of the mesh by its name.")
]
RunOrMesh = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RUN]", help="A run or mesh directory; default: the mesh started last."
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Overrides a key of the job file; VALUE is TOML or a bare string. May be repeated.",
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Changes a key of the run, from its next step on. May be repeated.",
    ),
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Overrides `seed` of the job file.")]
Force = Annotated[bool, typer.Option("--force", help="Replaces a run that has ended.")]
MeshOption = Annotated[
    Path | None,
    typer.Option(
        "--mesh", metavar="PATH", help="A run or mesh directory; default: the mesh started last."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Prints JSON for a program to read.")]


def _version(asked: bool) -> None:
    if asked:
        from meshrl import versions

        print(versions.line())
        raise typer.Exit


@app.callback()
def _meshrl(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Prints the version."),
    ] = False,
) -> None:
    """Reinforcement learning for language models on a mesh of accelerators.

    Exit status: 0 done, 1 an error (one line says what it is and what to do), 2 wrong usage,
    130 Ctrl-C; `watch` and `wait` have more.
    """


def _overrides(values: list[str] | None, seed: int | None) -> list[str]:
    return [*(values or []), *([] if seed is None else [f"seed={seed}"])]


@app.command(rich_help_panel="Runs")
def run(
    job: Job,
    seed: Seed = None,
    set_: Set = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Prints the resolved job and the process plan.")
    ] = False,
    force: Force = False,
) -> None:
    """Starts a mesh, trains the job on it, reports, and stops the mesh.

    The run directory is `out` of the job file, or else runs/NAME (runs/NAME-2 when that is taken).
    Ctrl-C stops cleanly and prints the command that resumes.

    Examples:

        meshrl run examples/calculator.toml

        meshrl run examples/calculator.toml --seed 1 --set budget.steps=12 --set mesh.workers=4

        meshrl run examples/calculator.toml --dry-run
    """
    from meshrl.job import jobfile
    from meshrl.preflight import checks

    found = jobfile.read(job, _overrides(set_, seed))
    checks.check(found)
    if dry_run:
        from meshrl import dryrun

        dryrun.show(found.config)
        return
    from meshrl.launch import session

    raise typer.Exit(session.run(found.config, found.base, force, job))


@app.command(rich_help_panel="Runs")
def init(
    name: Annotated[
        Path, typer.Argument(metavar="NAME", help="A new directory; the job is called as it is.")
    ],
) -> None:
    """Writes a small job that runs as it is: environment, reward, tokenizer and data.

    A model from scratch learns a guessing game within two minutes on two CPU cores;
    docs/first-job.md explains each file. Nothing that is there already is overwritten.

    Example:

        meshrl init mygame

        meshrl run mygame/job.toml
    """
    from meshrl.starter import creating

    creating.create(name)


@app.command(rich_help_panel="Runs")
def resume(run: Run, set_: Changes = None) -> None:
    """Continues a run that was stopped or cut off, or a finished one with more steps to do.

    With the mesh's Redis data in the run directory everything goes on where it was; without it the
    job starts again from its newest checkpoint. docs/operations.md lists what may change.

    Examples:

        meshrl resume runs/calculator

        meshrl resume runs/calculator --set optimizer.adamw_lr=0.0005

        meshrl resume runs/calculator --set budget.steps=96
    """
    from meshrl.launch.places import existing_run

    existing_run(run)  # first, because what follows takes a second to import
    from meshrl.run import resuming

    raise typer.Exit(resuming.resume(run, set_ or []))


@app.command(rich_help_panel="Runs")
def samples(
    run: RunOrMesh = None,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Only those of a step, evaluations of it too.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Those with the highest reward.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Those with the lowest.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Those without a reward.")] = False,
    most: Annotated[int, typer.Option("-n", metavar="N", help="How many.")] = 5,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Waits for more.")] = False,
    json: AsJson = False,
    mesh: MeshOption = None,
) -> None:
    """Shows trajectories: what the model said, its tools, its reward, how it ended.

    A run keeps a few of each step and of each evaluation, among them the best, the worst and those
    that failed; also while it goes on.

    Examples:

        meshrl samples runs/calculator --step 12 --best

        meshrl samples runs/calculator --failed --follow
    """
    from meshrl.observe import samples as reading
    from meshrl.run.target import run_of

    asked = [name for name, on in (("best", best), ("worst", worst), ("failed", failed)) if on]
    if len(asked) > 1:
        raise typer.BadParameter(f"--{asked[0]} and --{asked[1]} exclude each other")
    directory = run_of(run, mesh).directory
    order = asked[0] if asked else ""
    reading.show(directory, step, order, most, follow, json)


@app.command(rich_help_panel="Runs")
def audit(run: RunOrMesh = None, json: AsJson = False, mesh: MeshOption = None) -> None:
    """Accounts for every trajectory of a run, from its ledger and events alone.

    Of a mesh: of the job that it works on, or did last. Exits 1 when a trajectory is lost or was
    trained twice.

    Example:

        meshrl audit runs/calculator
    """
    from meshrl.observe import audit as auditing
    from meshrl.run.target import run_of

    raise typer.Exit(auditing.show(run_of(run, mesh).directory, json))


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
) -> None:
    """Shows a run as `meshrl run` does: one that was submitted, or is run in another terminal.

    Changes nothing; Ctrl-C ends the view and leaves the job running. Exit status, when the run is
    over: 0 it has finished, 1 it has failed, 3 it was stopped before its end; 130 after Ctrl-C.

    Example:

        meshrl watch runs/calculator
    """
    from meshrl.run import watching

    raise typer.Exit(watching.watch(run, mesh))


@app.command(rich_help_panel="Runs")
def wait(
    run: RunOrJob,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Gives up after that; default: never.")
    ] = None,
    json: AsJson = False,
    mesh: MeshOption = None,
) -> None:
    """Returns when a run is over and its report and model are written, and says how it ended.

    Exit status: 0 it has finished, 1 it has failed, 3 it was stopped before its end, 124 --timeout.

    Example:

        meshrl wait runs/calculator --timeout 3600 && meshrl audit runs/calculator
    """
    from meshrl.run import waiting

    raise typer.Exit(waiting.wait(run, mesh, timeout, json))


@app.command(rich_help_panel="Runs")
def cancel(run: RunOrJob, json: AsJson = False, mesh: MeshOption = None) -> None:
    """Ends a job cleanly: one of a mesh, which takes up the next one, or that of a `meshrl run`.

    What it has made stays, its last checkpoint too, and `meshrl resume` goes on from there. Exits 1
    when the job has finished or failed already.

    Example:

        meshrl cancel runs/calculator
    """
    from meshrl.run import waiting

    raise typer.Exit(waiting.cancel(run, mesh, json))


@app.command(rich_help_panel="Runs")
def export(
    run: Run,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", help="Of a step that is still kept; default: the last one."),
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The version that evaluation found best.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: RUN/model, or RUN/model-N.")
    ] = None,
) -> None:
    """Writes a version of a run as a Hugging Face directory, also while the run goes on.

    Of a run with adapters: the merged model, and the adapters in PEFT's layout in DIR/adapter.

    Example:

        meshrl export runs/calculator --step 12
    """
    from meshrl import exporting

    raise typer.Exit(exporting.export(run, step, best, out))


@app.command("eval", rich_help_panel="Runs")
def evaluate(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A Hugging Face directory, or a run.")
    ],
    job: Job,
    set_: Set = None,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Of a run: that step's; default: the last.")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Of a run: what its evaluations found best.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Evaluates a model on the held-out rows and evaluation datasets of a job, and trains nothing.

    It starts a mesh, prints the figures and writes them to evaluation.json in a run directory of
    its own, runs/NAME-eval. Progress goes to standard error.

    Examples:

        meshrl eval Qwen2.5-0.5B job.toml --set evaluation.problems=128

        meshrl eval runs/calculator examples/calculator.toml --best --json
    """
    from meshrl.run import evaluating

    raise typer.Exit(evaluating.evaluate(model, job, set_ or [], step, best, json))


@app.command(rich_help_panel="Runs")
def chat(
    run: RunOrJob,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="One trajectory of it, and the end.")
    ] = None,
    row: Annotated[
        int | None,
        typer.Option(metavar="N", help="One trajectory of a held-out row, from 0, and its reward."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: greedy.")] = 1.0,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Default: another each time.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="That step's model; default: the last.")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The model that evaluation found best.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Talks with the trained model, with the tools and in the environment of its job.

    A job with a chat format is a conversation; another one plays trajectories, of rows by their
    number or of prompts. It ends at the end of the input (Ctrl-D).

    Examples:

        meshrl chat runs/chat

        meshrl chat runs/calculator --prompt "?2a+3="

        meshrl chat runs/mygame --row 0 --temperature 0 --json
    """
    from meshrl.run import chatting

    raise typer.Exit(chatting.chat(run, step, best, prompt, row, temperature, seed, json))


@app.command(rich_help_panel="Meshes")
def up(
    workers: Annotated[int, typer.Option(metavar="N", help="Accelerators, or CPU slots.")] = 3,
    shards: Annotated[int, typer.Option(metavar="N", help="Rollout shards.")] = 1,
    device: Annotated[str, typer.Option(help="What workers are: cpu, or cuda.")] = "cpu",
    root: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where it keeps its files; default .meshrl.")
    ] = None,
    bind: Annotated[str, typer.Option(help="Where every process listens.")] = "tcp://127.0.0.1:*",
    advertise: Annotated[str, typer.Option(help="What it tells others; default: `bind`.")] = "",
    metrics: Annotated[
        str, typer.Option(help="Where each process serves its metrics, HOST:PORTS; or off.")
    ] = "127.0.0.1:*",
    ranks: Annotated[
        int, typer.Option(metavar="N", help="Workers that train together: a job's training.ranks.")
    ] = 1,
    sandboxes: Annotated[
        int, typer.Option(metavar="N", help="Sandbox processes, for tools and rewards.")
    ] = 1,
) -> None:
    """Starts a mesh in the background, for jobs that are submitted to it.

    $MESHRL_REDIS_URL names a Redis to use instead of an embedded one.

    Example:

        meshrl up --workers 4

        meshrl submit examples/calculator.toml

        meshrl down
    """
    from meshrl.launch import up_down

    up_down.up(root, workers, shards, device, bind, advertise, metrics, ranks, sandboxes)


@app.command(rich_help_panel="Meshes")
def down(mesh: MeshOption = None) -> None:
    """Stops a mesh with everything it started.

    Example:

        meshrl down
    """
    from meshrl.launch import up_down

    up_down.down(mesh)


@app.command(rich_help_panel="Runs")
def submit(
    job: Job, seed: Seed = None, set_: Set = None, force: Force = False, mesh: MeshOption = None
) -> None:
    """Hands a job to the mesh that runs, and returns.

    Example:

        meshrl submit examples/calculator.toml --set budget.steps=12
    """
    from meshrl import commands
    from meshrl.job import jobfile
    from meshrl.preflight import checks

    found = jobfile.read(job, _overrides(set_, seed))
    checks.check(found, starts_mesh=False)
    commands.submit(found.config, found.base, force, mesh, job)


@app.command(rich_help_panel="Meshes")
def status(
    run: RunOrMesh = None,
    stalled: Annotated[
        bool, typer.Option("--stalled", help="Names who waits and which process is the cause.")
    ] = False,
    json: AsJson = False,
    mesh: MeshOption = None,
) -> None:
    """Shows jobs, services and gangs, or with --stalled what holds them up.

    Of a run that is over: how it ended, and the command that goes on.

    Example:

        meshrl status

        meshrl status runs/calculator

        meshrl status --stalled --json
    """
    from meshrl import commands

    if stalled:
        commands.stalled(run, mesh, json)
    else:
        commands.status(run, mesh, json)


@app.command(rich_help_panel="Meshes")
def workers(json: AsJson = False, mesh: MeshOption = None) -> None:
    """Shows each worker with its accelerator, its role and the role it is to have.

    Example:

        meshrl workers
    """
    from meshrl import commands

    commands.workers(mesh, json)


@app.command(rich_help_panel="Meshes")
def move(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="As in `meshrl workers`: g1.")],
    role: Annotated[str, typer.Argument(metavar="ROLE", help="rollout, training or idle.")],
    mesh: MeshOption = None,
) -> None:
    """Gives a worker another role and keeps it there; the others go on.

    Example:

        meshrl move g1 training
    """
    from meshrl import commands

    commands.move(worker, role, mesh)


@app.command(rich_help_panel="Help")
def logs(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] [SERVICE]",
            help="A run or mesh directory, and a service as in rollout/0; default: all logs of "
            "the mesh started last.",
        ),
    ] = None,
    lines: Annotated[int, typer.Option("-n", "--lines", help="How many, of each log.")] = 20,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Waits for more.")] = False,
    mesh: MeshOption = None,
) -> None:
    """Prints the logs of a mesh, also of one that has stopped.

    Example:

        meshrl logs rollout/0 -f

        meshrl logs runs/calculator trainer/calculator
    """
    from meshrl import logs as printing

    printing.show(names or [], mesh, lines, follow)


engine = typer.Typer(no_args_is_help=True, help="Engines with an interpreter of their own.")
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
    from meshrl import engines

    print(engines.install(name, directory))


@app.command(rich_help_panel="Help")
def doctor() -> None:
    """Checks what this machine offers a mesh; each line that is not ok says the fix.

    Example:

        meshrl doctor
    """
    from meshrl import doctor as checks

    raise typer.Exit(checks.show())
