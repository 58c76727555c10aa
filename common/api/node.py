"""What a node agent and its workers offer: hints to look at the state, and what runs here."""

from __future__ import annotations

from common.api.hint import Look
from common.interface import Call, Cast, Interface
from common.wire import message


class Worker(Interface):
    look = Cast(Look)


@message
class ListWorkers:
    pass


@message
class WorkerProcess:
    gang: str
    pid: int
    adopted: bool  # started by an earlier incarnation of the agent
    restarts: int


@message
class WorkerProcesses:
    node: str
    accelerators: list[str]  # "cpu:0", or an nvidia GPU's "cuda:0 NVIDIA H200"
    workers: list[WorkerProcess]


class Node(Interface):
    workers = Call(ListWorkers, WorkerProcesses, deadline_s=5.0, idempotent=True)
