"""Slurm cluster on this machine: Debian's daemons on hosts that share a network and /home.

    async with Cluster(nodes=4) as cluster:
        job = (await cluster.user("sbatch", "--parsable", "job.sbatch")).strip()

Host `h0` is the controller and login node; `h1` and on are compute nodes. `USER` is an ordinary
user with the same home directory everywhere, and `/tmp` is each node's own. This machine's
configuration is neither read nor changed, and everything ends with the block.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
from pathlib import Path
from types import TracebackType

from loadtests.namespaces.host import Host
from loadtests.namespaces.hosts import Hosts
from tests.load import scaled

USER, UID = "researcher", 20001
HOME = f"/home/{USER}"
SETTINGS = "/home/.cluster"  # configuration files of the daemons, on every host
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "munged", "runuser")
READY_S = 120.0
CPUS = 4  # declared per node: jobs wait for processors, not for each other
MEMORY_MIB = 16384
CONFIGURATION = """\
ClusterName=test
SlurmctldHost=h0
AuthType=auth/munge
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=/var/lib/slurmctld
SlurmdSpoolDir=/var/lib/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobRequeue=1
KillWait=30
ReturnToService=2
MailProg=/bin/true
NodeName=h[1-{nodes}] CPUs={cpus} RealMemory={memory} State=UNKNOWN
PartitionName=all Nodes=h[1-{nodes}] Default=YES MaxTime=INFINITE State=UP
"""


def list_missing_programs() -> str:
    """Return the missing programs of Slurm; empty if there are none."""
    return ", ".join(name for name in PROGRAMS if shutil.which(name) is None)


class Cluster:
    """Slurm cluster with `nodes` compute nodes."""

    def __init__(self, nodes: int) -> None:
        self.hosts = Hosts(nodes + 1, shared="/home")
        self._nodes = nodes
        self._stack = contextlib.AsyncExitStack()

    @property
    def login(self) -> Host:
        return self.hosts[0]

    async def __aenter__(self) -> Cluster:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.hosts)
            self._configure()
            for number in range(self._nodes + 1):
                await self._begin(stack, self.hosts[number])
            await self._idle()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def admin(self, *words: str) -> str:
        """Return the output of a command of the cluster's administrator."""
        return (await self.login.run(*words)).out

    async def user(self, *words: str, check: bool = True) -> str:
        """Return the output of the user's command, run at the login node in the home directory."""
        here = self.login.environment["PATH"]
        words = ("env", f"HOME={HOME}", f"PATH={here}", "sh", "-c", 'cd; exec "$@"', "sh", *words)
        ran = await self.login.run("runuser", "-u", USER, "--", *words, check=check)
        return ran.out

    def home(self, path: str) -> Path:
        """Return the path on this machine of a file in the user's home directory."""
        return self.login.path(f"{HOME}/{path}")

    async def jobs(self, job: str) -> dict[str, dict[str, str]]:
        """Return the output of `scontrol` for a job, or for each task of an array by its number."""
        found = {}
        for line in (await self.admin("scontrol", "show", "job", "--oneliner", job)).splitlines():
            row = dict(word.partition("=")[::2] for word in line.split() if "=" in word)
            found[row.get("ArrayTaskId", "")] = row
        return found

    def _configure(self) -> None:
        place = self.login.path(SETTINGS)
        place.mkdir(mode=0o755)
        values = {"nodes": self._nodes, "cpus": CPUS, "memory": MEMORY_MIB}
        (place / "slurm.conf").write_text(CONFIGURATION.format(**values))
        (place / "munge.key").write_bytes(secrets.token_bytes(128))
        (place / "munge.key").chmod(0o600)
        known = f"{USER}:x:{UID}:{UID}::{HOME}:/bin/bash\n"
        (place / "passwd").write_text(Path("/etc/passwd").read_text() + known)
        group = f"{USER}:x:{UID}:\n"
        (place / "group").write_text(Path("/etc/group").read_text() + group)
        self.login.path(HOME).mkdir(mode=0o700)
        os.chown(self.login.path(HOME), UID, UID)

    async def _begin(self, stack: contextlib.AsyncExitStack, host: Host) -> None:
        for name in ("passwd", "group"):
            await host.run("mount", "--bind", f"{SETTINGS}/{name}", f"/etc/{name}")
        await host.run("mount", "--bind", SETTINGS, "/etc/slurm")
        for place in ("run/munge", "var/log/munge", "var/lib/munge", "var/lib/slurmctld"):
            host.path(place).mkdir(mode=0o755, parents=True)
        munged = ("munged", "--foreground", "--force", f"--key-file={SETTINGS}/munge.key")
        await stack.enter_async_context(host.started(*munged, log="munged.log"))
        name = "slurmd" if host.number else "slurmctld"
        words = (name, "-D", *(("-N", host.name) if host.number else ()))
        await stack.enter_async_context(host.started(*words, log=f"{name}.log"))

    async def _idle(self) -> None:
        async with asyncio.timeout(scaled(READY_S)):
            while True:
                ran = await self.login.run("sinfo", "-h", "-N", "-o", "%T", check=False)
                if ran.out.split() == ["idle"] * self._nodes:
                    return
                await asyncio.sleep(0.5)
