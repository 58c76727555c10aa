"""The program, and the arguments that several commands share."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.models import CommandFunctionType

from meshrl.common.base.host.terminal import escaped_output


class _GuardedCommand(TyperCommand):
    """A command whose output shows control characters of texts that it prints."""

    def invoke(self, ctx: Any) -> Any:
        with escaped_output():
            return super().invoke(ctx)


class CommandGroup(typer.Typer):
    """A group of commands."""

    def command(
        self, name: str | None = None, **options: Any
    ) -> Callable[[CommandFunctionType], CommandFunctionType]:
        return super().command(name, cls=_GuardedCommand, **options)


app = CommandGroup(
    name="meshrl",
    epilog="A first run: meshrl init mygame; meshrl run mygame/job.toml",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _parse_run_argument(text: str) -> Path:
    """The directory that an argument names; of a URL, one to which the run is brought."""
    if "://" not in text:
        return Path(text)
    from meshrl.run.run_download import download_run

    return download_run(text)


JobArgument = Annotated[
    Path, typer.Argument(metavar="JOB", help="A job file (TOML).", show_default=False)
]
RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        parser=_parse_run_argument,
        help="A run directory, as in runs/calculator, or a run's URL.",
    ),
]
RunOrJobArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run directory, or a job of the mesh by its name.")
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
        help="Overrides a key of the job file; VALUE is TOML or a bare string. May be repeated.",
    ),
]
ChangeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Changes a key of the run, from its next step on. May be repeated.",
    ),
]
SeedOption = Annotated[
    int | None, typer.Option(metavar="N", help="Overrides `seed` of the job file.")
]
RateUpOption = Annotated[
    float,
    typer.Option(metavar="MB", min=0, help="A second, that bulk ports here send; 0: no bound."),
]
RateDownOption = Annotated[
    float, typer.Option(metavar="MB", min=0, help="A second, that they receive; 0: no bound.")
]
NoWorkersOption = Annotated[
    bool, typer.Option("--no-workers", help="This host computes nothing: it gives no worker.")
]
ServicesOption = Annotated[
    str | None,
    typer.Option(
        metavar="KINDS",
        help="Which services of jobs may be placed here: shards, sandboxes, or none; default: "
        "shards,sandboxes.",
    ),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replaces a run that has ended.")]
ForegroundOption = Annotated[
    bool, typer.Option("--foreground", help="Stays, as the main process of a container does.")
]
HealthOption = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        help="Where this host as a whole serves /livez, /readyz and /metrics; default: nowhere.",
    ),
]
MetricsOption = Annotated[
    str, typer.Option(help="Where each process serves its metrics, HOST:PORTS; or off.")
]
RootOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Where this host keeps its files; default .meshrl."),
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
        help="A token of `meshrl token create`, or its file, for a mesh of somebody else's; "
        "default: $MESHRL_TOKEN.",
    ),
]
SamplingSeedOption = Annotated[
    int | None, typer.Option("--seed", metavar="N", help="Default: another each time.")
]
StepOption = Annotated[
    int | None,
    typer.Option("--step", metavar="N", help="Of a run: that step's model; default: the last."),
]
BestOption = Annotated[
    bool, typer.Option("--best", help="Of a run: the one that evaluation found best.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Prints JSON for a program to read.")]


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
            "--version", callback=_print_version, is_eager=True, help="Prints the version."
        ),
    ] = False,
) -> None:
    """Reinforcement learning for language models on a mesh of accelerators.

    Exit status: 0 done, 1 an error (one line says what it is and what to do), 2 wrong usage,
    130 Ctrl-C; `watch` and `wait` have more.
    """


def merge_overrides(values: list[str] | None, seed: int | None) -> list[str]:
    """`--set` and `--seed` as keys of the job file."""
    return [*(values or []), *([] if seed is None else [f"seed={seed}"])]
