"""Program `meshrl`, and the arguments that several commands share."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.models import CommandFunctionType

from meshrl.cli.habits import GuardedCommand, HintingGroup


class CommandGroup(typer.Typer):
    """Group of commands."""

    def command(
        self, name: str | None = None, **options: Any
    ) -> Callable[[CommandFunctionType], CommandFunctionType]:
        return super().command(name, **{"cls": GuardedCommand, **options})


app = CommandGroup(
    name="meshrl",
    cls=HintingGroup,
    epilog="A first run: meshrl init mygame; meshrl run mygame/job.toml",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _parse_run_argument(text: str) -> Path:
    """Return the run directory of an argument; download the run first if the argument is a URL."""
    if "://" not in text:
        return Path(text)
    from meshrl.runs.run_download import download_run

    return download_run(text)


JobArgument = Annotated[
    Path, typer.Argument(metavar="JOB", help="A job file (TOML).", show_default=False)
]
RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        parser=_parse_run_argument,
        help="A run directory such as runs/calculator, or the URL of a run.",
    ),
]
RunOrJobArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run directory, or the name of a job of the mesh.")
]
RunOrUrlArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RUN]",
        parser=_parse_run_argument,
        help="A run directory, or a run's URL; default: the mesh started last.",
    ),
]
RunOrMeshArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RUN]", help="A run or mesh directory; default: the mesh started last."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the job file; VALUE is TOML or a bare string. Repeatable.",
    ),
]
ChangeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a key of the run from its next step on. Repeatable.",
    ),
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Same as --set KEY=VALUE.", show_default=False),
]
WorkersOption = Annotated[
    int | None, typer.Option(metavar="N", help="Override the key `mesh.workers` of the job file.")
]
SeedOption = Annotated[
    int | None, typer.Option(metavar="N", help="Override the key `seed` of the job file.")
]
RateUpOption = Annotated[
    float,
    typer.Option(
        metavar="MB", min=0, help="Limit of the send rate of bulk ports, in MB/s; 0: no limit."
    ),
]
RateDownOption = Annotated[
    float,
    typer.Option(
        metavar="MB", min=0, help="Limit of the receive rate of bulk ports, in MB/s; 0: no limit."
    ),
]
NoWorkersOption = Annotated[
    bool, typer.Option("--no-workers", help="Contribute no workers: this host computes nothing.")
]
ServicesOption = Annotated[
    str | None,
    typer.Option(
        metavar="KINDS",
        help="Services of jobs that may run on this host: shards, sandboxes, or none; default: "
        "shards,sandboxes.",
    ),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace a run that has ended.")]
ForegroundOption = Annotated[
    bool,
    typer.Option(
        "--foreground", help="Stay in the foreground, as the main process of a container."
    ),
]
HealthOption = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        help="Address that serves /livez, /readyz and /metrics of this host; default: none.",
    ),
]
MetricsOption = Annotated[
    str, typer.Option(help="HOST:PORTS at which processes serve their metrics; or off.")
]
RootOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Directory of this host's mesh files; default: .meshrl."),
]
MeshOption = Annotated[
    Path | None,
    typer.Option(
        "--mesh", metavar="PATH", help="A run or mesh directory; default: the mesh started last."
    ),
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        "--token",
        metavar="FILE",
        envvar="MESHRL_TOKEN",
        show_envvar=False,
        help="A token that `meshrl token create` made, or its file, for another user's mesh; "
        "default: $MESHRL_TOKEN.",
    ),
]
SamplingSeedOption = Annotated[
    int | None, typer.Option("--seed", metavar="N", help="Seed of sampling; default: random.")
]
StepOption = Annotated[
    int | None,
    typer.Option(
        "--step", metavar="N", help="For a run: use the model of step N; default: the last step."
    ),
]
BestOption = Annotated[
    bool, typer.Option("--best", help="For a run: use the model with the best evaluation.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _print_version(requested: bool) -> None:
    if requested:
        try:
            version = metadata.version("meshrl")
        except metadata.PackageNotFoundError:
            version = f"from {Path(__file__).parents[2]}, not installed"
        print(f"meshrl {version} (Python {platform.python_version()})")
        raise typer.Exit


@app.callback()
def _meshrl(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Reinforcement learning for language models on a mesh of accelerators.

    Exit status: 0 success, 1 error (one line describes the error and its fix), 2 wrong usage,
    130 Ctrl-C; `watch` and `wait` define more.
    """


def merge_overrides(
    values: list[str] | None,
    positional: list[str] | None,
    seed: int | None = None,
    workers: int | None = None,
) -> list[str]:
    """Return `--set`, `KEY=VALUE`, `--seed` and `--workers` as settings of job-file keys."""
    for one in positional or []:
        if "=" not in one:
            raise typer.BadParameter(f"{one!r} is neither KEY=VALUE nor an option")
    options = {"seed": seed, "mesh.workers": workers}
    named = [f"{key}={value}" for key, value in options.items() if value is not None]
    return [*(values or []), *(positional or []), *named]
