"""Commands that start a run, continue it, or use its results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshrl.cli.arguments import (
    BestOption,
    ChangeOption,
    ForceOption,
    JobArgument,
    JsonOption,
    MeshOption,
    OverridesArgument,
    RunArgument,
    RunOrJobArgument,
    SamplingSeedOption,
    SeedOption,
    SetOption,
    StepOption,
    TokenOption,
    WorkersOption,
    app,
    merge_overrides,
)
from meshrl.cli.habits import JobCommand


@app.command(cls=JobCommand, rich_help_panel="Runs")
def run(
    job: JobArgument,
    overrides: OverridesArgument = None,
    seed: SeedOption = None,
    workers: WorkersOption = None,
    set_: SetOption = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print what differs from the defaults, processes and memory."
        ),
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="With --dry-run: print every key of the job.")
    ] = False,
    force: ForceOption = False,
) -> None:
    """Start a mesh, train the job on it, write the report, and stop the mesh.

    The key `out` of the job file sets the run directory; default: runs/NAME, or runs/NAME-2 if that
    exists. Ctrl-C stops cleanly and prints the command that resumes the run.

    Examples:

        meshrl run examples/calculator.toml

        meshrl run examples/calculator.toml budget.steps=12 --seed 1 --workers 4

        meshrl run examples/calculator.toml --dry-run
    """
    from meshrl.commands import dry_run as dry_run_output
    from meshrl.job import hub_origins, job_reader
    from meshrl.launch.checks import mesh_checks

    if everything and not dry_run:
        raise typer.BadParameter("--all belongs to --dry-run")
    found = job_reader.read_job_file(job, merge_overrides(set_, overrides, seed, workers))
    mesh_checks.check_job_and_mesh(found)
    if dry_run:
        dry_run_output.print_dry_run(found, everything)
        return
    dry_run_output.print_choices(found)
    dry_run_output.warn_of_excess(found)
    hub_origins.fetch_weights(found)
    from meshrl.runs import session

    raise typer.Exit(session.run_job(found.config, found.base, force, job))


@app.command(rich_help_panel="Runs")
def init(
    name: Annotated[
        Path, typer.Argument(metavar="NAME", help="A new directory; the job has the same name.")
    ],
    example: Annotated[
        str,
        typer.Option(
            help="Copy an example instead (calculator, chat, code), or a recipe such as gsm8k."
        ),
    ] = "",
) -> None:
    """Write a small job that runs unchanged: environment, reward, tokenizer and data.

    A model from scratch learns a guessing game within two minutes on two CPU cores;
    docs/use/first-job.md explains each file. Existing files are not overwritten.

    Examples:

        meshrl init mygame

        meshrl run mygame/job.toml

        meshrl init mysums --example calculator

        meshrl init maths --example gsm8k
    """
    from meshrl.job_template import job_creation

    job_creation.create_job(name, example)


@app.command(cls=JobCommand, rich_help_panel="Runs")
def resume(
    run: RunArgument, overrides: OverridesArgument = None, set_: ChangeOption = None
) -> None:
    """Continue a run that was stopped or interrupted, or extend a finished run.

    If the run directory has the mesh's Redis data, the job continues exactly where it was.
    Otherwise it restarts from its newest checkpoint. docs/operate/jobs.md lists the keys that may
    change.

    Examples:

        meshrl resume runs/calculator

        meshrl resume runs/calculator --set optimizer.adamw_lr=0.0005

        meshrl resume runs/calculator --set budget.steps=96
    """
    from meshrl.directory.directory_paths import require_run

    require_run(run)  # first, because what follows takes a second to import
    from meshrl.runs import resumption

    raise typer.Exit(resumption.resume_run(run, merge_overrides(set_, overrides)))


@app.command(cls=JobCommand, rich_help_panel="Runs")
def submit(
    job: JobArgument,
    overrides: OverridesArgument = None,
    seed: SeedOption = None,
    set_: SetOption = None,
    force: ForceOption = False,
    mesh: MeshOption = None,
    token: TokenOption = None,
) -> None:
    """Submit a job to the running mesh, and return.

    With a token, which `meshrl token create` makes, submit it to another user's mesh.

    Examples:

        meshrl submit examples/calculator.toml --set budget.steps=12

        meshrl submit job.toml --token alice.token
    """
    from meshrl.client import job_check
    from meshrl.client.client import run_request
    from meshrl.commands import dry_run as dry_run_output

    found = job_check.load_checked_job(job, merge_overrides(set_, overrides, seed), None)
    handle = run_request(lambda c: c.submit(found, job_file=job, force=force), mesh, token)
    dry_run_output.print_choices(found)
    print(f"submitted {handle.name}; its run directory is {handle.run_dir}")


@app.command(rich_help_panel="Runs")
def export(
    run: RunArgument,
    step: StepOption = None,
    best: BestOption = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: RUN/model, or RUN/model-N.")
    ] = None,
    token: TokenOption = None,
) -> None:
    """Write a version of a run as a Hugging Face directory, also during the run.

    For a run with adapters, write the merged model, and the adapters in PEFT's layout to
    DIR/adapter.

    Example:

        meshrl export runs/calculator --step 12
    """
    if token and not (run / "job.json").is_file():
        from meshrl.client.client import run_request

        print(run_request(lambda c: c.weights(str(run), step, best=best, out=out), token=token))
        return
    from meshrl.directory import model_export

    raise typer.Exit(model_export.export_model(run, step, best, out))


@app.command("eval", cls=JobCommand, rich_help_panel="Runs")
def evaluate(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A Hugging Face directory, a Hub id, or a run.")
    ],
    job: JobArgument,
    overrides: OverridesArgument = None,
    workers: WorkersOption = None,
    set_: SetOption = None,
    step: StepOption = None,
    best: BestOption = False,
    json: JsonOption = False,
) -> None:
    """Evaluate a model on the held-out rows and evaluation datasets of a job, without training.

    The command starts a mesh, prints the figures, and writes them to evaluation.json in a new run
    directory, runs/NAME-eval. Progress goes to standard error.

    Examples:

        meshrl eval Qwen2.5-0.5B job.toml --set evaluation.problems=128

        meshrl eval runs/calculator examples/calculator.toml --best --json
    """
    if model.suffix == ".toml":
        raise typer.BadParameter(f"{model} is a job file. Type: meshrl eval MODEL JOB")
    from meshrl.runs import evaluation

    settings = merge_overrides(set_, overrides, workers=workers)
    raise typer.Exit(evaluation.evaluate_model(model, job, settings, step, best, json))


@app.command(rich_help_panel="Runs")
def chat(
    run: RunOrJobArgument,
    prompt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Play one trajectory of this prompt and exit."),
    ] = None,
    row: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Play one trajectory of held-out row N, from 0, and print its reward."
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0: greedy.")
    ] = 1.0,
    seed: SamplingSeedOption = None,
    step: StepOption = None,
    best: BestOption = False,
    json: JsonOption = False,
) -> None:
    """Chat with the trained model, with the tools and in the environment of its job.

    A job with a chat format starts a conversation. Other jobs play trajectories of rows (by number)
    or of prompts. The command ends at the end of its input (Ctrl-D).

    Examples:

        meshrl chat runs/chat

        meshrl chat runs/calculator --prompt "?2a+3="

        meshrl chat runs/mygame --row 0 --temperature 0 --json
    """
    from meshrl.runs import model_sampling

    choice = model_sampling.ModelChoice(step, best, temperature, seed, json)
    raise typer.Exit(model_sampling.chat_with_model(run, choice, prompt, row))


@app.command(rich_help_panel="Runs")
def sample(
    run: RunOrJobArgument,
    prompt: Annotated[
        str,
        typer.Argument(
            metavar="PROMPT",
            help="A prompt, a whole row as a JSON object, or - for one per line of standard input.",
        ),
    ],
    n: Annotated[
        int, typer.Option("--n", "-n", min=1, metavar="N", help="Trajectories per prompt.")
    ] = 1,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0: greedy.")
    ] = 1.0,
    greedy: Annotated[bool, typer.Option("--greedy", help="Same as --temperature 0.")] = False,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Sampled tokens per trajectory; default: as many as fit."
        ),
    ] = None,
    seed: SamplingSeedOption = None,
    step: StepOption = None,
    best: BestOption = False,
    json: JsonOption = False,
) -> None:
    """Sample trajectories of a prompt with a run's model, in the environment of its job.

    The command also works during a run. It prints the model's text, its tool calls, the reward
    where the row allows one, and the tokens. A prompt that equals a row's prompt uses that row.
    Exit status 1: a trajectory or its reward failed.

    Examples:

        meshrl sample runs/calculator '?12a-16b-15='

        meshrl sample runs/calculator '{"prompt": "?2a+3=", "answer": 5}' --n 4 --best --json

        meshrl sample runs/mygame - --greedy < prompts.txt
    """
    from meshrl.runs import model_sampling

    choice = model_sampling.ModelChoice(step, best, 0.0 if greedy else temperature, seed, json)
    raise typer.Exit(model_sampling.sample_model(run, prompt, choice, n, max_tokens))
