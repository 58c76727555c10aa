"""Child process of a Python program that runs its job, and ends when that program ends.

`python -m meshrl.scripting.run_process PARENT REPORT_FD start REQUEST_DIRECTORY` runs a new job,
`... resume RUN KEY=VALUE...` continues a run. It reports to the descriptor, in one JSON object per
line: {"directory": run} once the mesh has started, {"error": {code, message, where, fix}}.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrl.common.base.errors import MeshError
from meshrl.common.base.host.terminal import escaped_output, print_traceback
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.process.entry.child import PRIVATE_UMASK
from meshrl.directory import process_user
from meshrl.scripting.child_process import EXIT_ERROR
from meshrl.scripting.job_request import MODULES_FOLDER, JobRequest, make_text_translator

if TYPE_CHECKING:
    from meshrl.job.job_file import JobFile

PARENT_POLL_S = 0.5
ORDERLY_STOP_S = 5.0  # after the end of the parent; then all processes are killed
KILL_TIMEOUT_S = 2.0  # for this process to kill the others; then they follow its end
EXIT_INTERRUPTED = 130
Report = Callable[..., None]


def main(argv: list[str]) -> int:
    """Run the action and return the exit status; report an error instead of printing it."""
    parent, descriptor, action, *arguments = argv
    os.set_inheritable(int(descriptor), False)  # else the parent would wait for later processes
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent may ignore it
    threading.Thread(target=_follow_parent, args=(int(parent),), daemon=True).start()
    os.umask(PRIVATE_UMASK)
    process_user.ensure_temporary_home()
    with os.fdopen(int(descriptor), "w", encoding="utf-8", buffering=1) as reports:

        def report(**message: Any) -> None:
            reports.write(json.dumps(message) + "\n")

        act = _start if action == "start" else _resume
        try:
            with escaped_output():
                return act(arguments, report)
        except MeshError as error:
            fields = {name: getattr(error, name) for name in ("code", "message", "where", "fix")}
            report(error=fields)
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        except Exception as error:  # a fault of MeshRL
            print_traceback(type(error), error, error.__traceback__)
        return EXIT_ERROR


def _follow_parent(parent: int) -> None:
    """Stop the run when the parent has ended, in order at first.

    A pipe would stay open in processes that the parent forks, and a signal of the kernel would
    follow the end of the parent's thread.
    """
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    for number, wait_s in ((signal.SIGINT, ORDERLY_STOP_S), (signal.SIGINT, KILL_TIMEOUT_S)):
        os.kill(os.getpid(), number)
        time.sleep(wait_s)
    os.kill(os.getpid(), signal.SIGKILL)


def _start(arguments: list[str], report: Report) -> int:
    directory = Path(arguments[0])

    def on_started(run_dir: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)  # all of it is in the run's bundle
        report(directory=str(run_dir))

    from meshrl.job.defaults.choices import describe_choices
    from meshrl.runs import session

    try:
        found, request = read_checked_job(directory)
        if text := describe_choices(found.choices):
            print(text, flush=True)
        return session.run_job(
            found.config, found.base, request.force, request.job_file, on_started
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def read_checked_job(directory: Path) -> tuple[JobFile, JobRequest]:
    """Return the job of a request, checked together with its mesh, and the request.

    Raises ConfigError with the wrong key, or the place in the author's code or rows.
    """
    from meshrl.job import hub_origins, job_reader
    from meshrl.launch.checks import mesh_checks

    request = JobRequest.read(directory)
    collect = partial(_collect_modules, request, directory / MODULES_FOLDER)
    translate = make_text_translator(directory)
    try:
        found = job_reader.read_document(
            request.document, request.overrides, Path(request.base), request.job_file, collect
        )
        mesh_checks.check_job_and_mesh(found)
        hub_origins.fetch_weights(found)
    except MeshError as error:
        error.message, error.where = translate(error.message), translate(error.where)
        error.fix = translate(error.fix)
        raise
    return found, request


def _collect_modules(request: JobRequest, target: Path, config: JobConfig) -> Path:
    """Copy the modules that the job names beside the generated one; return their directory."""
    from meshrl.job import bundle

    bundle.copy_modules(config, Path(request.base), target)
    for module, root in request.module_roots.items():
        bundle.copy_local_imports(Path(root), [module], target)
    return target


def _resume(arguments: list[str], report: Report) -> int:
    from meshrl.runs import resumption

    report(directory=arguments[0])
    return resumption.resume_run(Path(arguments[0]), arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
