"""Commands and options as users of other trainers type them, and what to type instead."""

from __future__ import annotations

import shlex
from typing import Any

from typer.core import TyperCommand, TyperGroup

from meshrl.common.base.host.terminal import escaped_output

_RUN = "run JOB"
_STOP = "`meshrl cancel RUN` stops a run, `meshrl down` stops a mesh."
_USE = (
    "`meshrl chat RUN` and `meshrl sample RUN PROMPT` use the model; `meshrl export RUN` writes it "
    "as a directory that vLLM and SGLang serve."
)
# Unknown command -> the command to type, with its arguments in upper case, or a sentence.
_COMMANDS = {
    **dict.fromkeys(("train", "fit", "learn", "launch", "grpo", "rl", "sft", "rollout"), _RUN),
    "start": "`meshrl run JOB` trains a job, `meshrl up` starts a mesh for several jobs.",
    **dict.fromkeys(("stop", "kill", "abort", "terminate"), _STOP),
    **dict.fromkeys(("ls", "ps", "list", "jobs", "runs", "show", "info"), "status"),
    **dict.fromkeys(("generate", "predict", "infer", "complete"), "sample RUN PROMPT"),
    **dict.fromkeys(("serve", "inference", "deploy"), _USE),
    **dict.fromkeys(("save", "merge", "convert", "push"), "export RUN"),
    **dict.fromkeys(("evaluate", "test", "benchmark"), "eval MODEL JOB"),
    **dict.fromkeys(("new", "create", "quickstart"), "init NAME"),
    **dict.fromkeys(("restart", "continue"), "resume RUN"),
    **dict.fromkeys(("attach", "monitor", "follow"), "watch RUN"),
    **dict.fromkeys(("plot", "dashboard", "metrics", "tensorboard", "view"), "report RUN"),
    **dict.fromkeys(("check", "validate", "lint"), "run JOB --dry-run"),
    **dict.fromkeys(("rm", "remove"), "delete JOB"),
    "help": "--help",
    "version": "--version",
}
# Unknown option -> what to type.
_OPTIONS = {
    **dict.fromkeys(
        ("--config", "--config-file", "--config-path", "--cfg", "--job", "--file"),
        "The job file is an argument. Type:\nmeshrl run job.toml",
    ),
    **dict.fromkeys(
        ("--resume", "--resume-from", "--resume-from-checkpoint", "--checkpoint"),
        "Type:\nmeshrl resume RUN",
    ),
    **dict.fromkeys(("--verbose", "--debug", "--log-level"), "`meshrl logs RUN` prints all logs."),
}


class GuardedCommand(TyperCommand):
    """Command that escapes control characters in its output."""

    def invoke(self, ctx: Any) -> Any:
        with escaped_output():
            return super().invoke(ctx)


class JobCommand(GuardedCommand):
    """Command with settings of job-file keys, which also accepts them as `--KEY VALUE`.

    An unknown option without a dot ends it with the command to type, if a key corresponds.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for param in self.get_params(ctx) for name in param.opts}
        words, rewritten = list(args), list[str]()
        while words:
            word = words.pop(0)
            name, _, value = word.partition("=")
            if not name[2:] or not name.startswith("--") or name.replace("_", "-") in known:
                rewritten.append(word)
                continue
            if "=" not in word and words and not words[0].startswith("--"):
                value = words.pop(0)
            if "." in name:
                if not value:
                    ctx.fail(f"{name} has no value. Type: {name[2:]}=VALUE")
                rewritten += ["--set", f"{name[2:]}={value}"]
            elif hint := _OPTIONS.get(name):
                ctx.fail(f"No such option: {name}. {hint}")
            elif key := _find_key(name):
                found = [*rewritten, f"{key}={value or 'VALUE'}", *words]
                command = f"{ctx.command_path} {shlex.join(found)}"
                ctx.fail(f"No such option: {name}. It is a key of the job file. Type:\n{command}")
            else:
                rewritten.append(word)  # the parser reports it
        return super().parse_args(ctx, rewritten)


def _find_key(option: str) -> str:
    """Return the key of job files that an option most likely means; empty if there is none."""
    from meshrl.common.job.familiar_keys import FAMILIAR_KEYS
    from meshrl.common.job.schema import JOB_SCHEMA

    name = option.removeprefix("--").replace("-", "_").lower()
    key = FAMILIAR_KEYS.get(name, "")
    return key if key in JOB_SCHEMA.types_by_key else JOB_SCHEMA.find_nearest_key(name)


class HintingGroup(TyperGroup):
    """Group whose error for an unknown command has the command to type."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and (hint := _COMMANDS.get(args[0])):
            if "`" not in hint:
                words = hint.split()
                if args[1:]:  # the user's own arguments instead of the names
                    words = [word for word in words if not word.isupper()] + args[1:]
                hint = f"Type:\nmeshrl {shlex.join(words)}"
            ctx.fail(f"No such command {args[0]!r}. {hint}")
        return super().resolve_command(ctx, args)
