"""What the documents of jobs ask of the pool, and whether a pool could ever give it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from common.job import builtin
from common.job.isolation.isolation import RUNNER
from common.job.isolation.runners import Runner
from common.job.pace import declared_pace
from common.state.pool.demand.needs import Need


def need_of(document: Mapping[str, Any], parameters: int | None = None) -> Need:
    """What a job asks for, by the document that it was submitted as; `parameters` of its model, if
    that is not packed yet.
    """
    if parameters is None:
        parameters = document.get("bundle", {}).get("parameters", 0)
    pool, models, rollout = document["pool"], document["models"], document["rollout"]
    reward = document["reward"]
    sandboxed = document["environment"]["tools"] or reward["use"] or reward["parts"]
    degrees = tuple(sorted(set(rollout["tensor_parallel"])))
    return Need(
        ranks=document["training"]["ranks"],
        attention=document["training"].get("zebra", {}).get("attention", 0),
        divides=document["training"].get("zebra", {}).get("auto", False),
        rolls_out=document["algorithm"]["name"] != "sft",
        scoring=any(model["path"] for model in models.values()),
        # A server computes when it likes, and an engine of several workers on all of them at once.
        alternates=rollout["engine"] != "sglang" and degrees[0] == 1,
        shards=rollout["shards"],
        sandboxes=document["sandbox"]["processes"] if sandboxed else 0,
        tier=_tier(document),
        least=pool["workers"]["least"],
        most=pool["workers"]["most"],
        priority=pool["priority"],
        share=pool["share"],
        bytes=4 * parameters,
        adapters=bool(document["lora"]["rank"]),
        moments=1 if document["optimizer"]["muon_lr"] else 2,  # Muon has one, AdamW two
        helped=_helped(document),
        half=rollout["dtype"] != "float32",
        degrees=degrees,
    )


def _helped(document: Mapping[str, Any]) -> bool:
    """Whether others than its core can compute its gradients; not where ranks keep a pace that is
    theirs alone.
    """
    training = document["training"]
    if declared_pace(training.get("pace", "")) is not None:
        return False
    return not unhelped([document["rollout"]["dtype"]], training["dtype"])


def unhelped(published: Iterable[str], computed: str) -> str:
    """Why nobody but a job's core can compute its gradients; empty: helpers can. They have what is
    `published`, in these types, which has to be what the core makes of its float32 weights to
    compute in the type `computed`. The planner asks so, and the core of those that ask it.
    """
    if not (other := sorted(set(published) - {"float32", computed})):
        return ""
    return (
        f"versions are published in {other[0]}, and gradients are computed of {computed}: a "
        "helper would compute other ones than the core"
    )


def _tier(document: Mapping[str, Any]) -> str:
    """The tier of isolation that the hosts of a job's sandboxes have to have. Whether a runner of
    the job's own works is found out where it is tried: no host tells that of itself.
    """
    reward, sandbox = document["reward"], document["sandbox"]
    rewards = [reward["use"], *(part["use"] for part in reward["parts"])]
    if not builtin.jailed([*document["environment"]["tools"].values(), *rewards]):
        return ""
    if sandbox["runner"]:
        return RUNNER if Runner(tuple(sandbox["runner"])).runsc else ""
    return str(sandbox["tier"])
