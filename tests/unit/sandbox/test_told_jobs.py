"""What a sandbox loads is what its job's document says, whoever asks for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshrl.common.api.sandbox import JailSettings, LoadJob, RewardPart
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import Refused
from meshrl.common.job.bundle.loading import digest_of
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.sandbox.actor import SandboxActor, ServedSandbox
from meshrl.services.sandbox.workers.calls import PoolLimits

TOLD = LoadJob("j", "/runs/j/bundle/modules", {}, bundle="d1")
OTHERS = {
    "other modules": replace(TOLD, bundle_dir="/tmp/mine"),
    "another bundle": replace(TOLD, bundle="d2"),
    "a tool": replace(TOLD, tools={"run": "os:system"}),
    "a reward": replace(TOLD, rewards=[RewardPart("os:system")]),
    "a server": replace(TOLD, mcp={"files": ["sh", "-c", "true"]}),
    "another interpreter": replace(TOLD, jail=JailSettings(python="/tmp/python")),
    "a runner": replace(TOLD, jail=JailSettings(runner=["sh"])),
    "a weaker jail": replace(TOLD, jail=JailSettings(tier="none")),
}


@pytest.mark.parametrize("what", OTHERS)
async def test_a_shard_that_brings_other_code_than_the_document_has_is_refused(what: str) -> None:
    actor = SandboxActor(
        SystemHost(),
        SystemClock(),
        None,
        PoolLimits(),
        ServedSandbox("sandbox/j/0", "j", digest_of(TOLD)),
    )
    with pytest.raises(Refused, match="what the job's document does not say"):
        await actor.load(OTHERS[what])
    assert (await actor.load(TOLD)).job == "j"
    with pytest.raises(Refused, match="what the job's document does not say"):
        await actor.load(OTHERS[what])
    await actor.stop()


def test_a_request_that_has_travelled_has_the_same_digest() -> None:
    whole = replace(TOLD, rewards=[RewardPart("exact", 1, {"b": 1, "a": [0.5, None]})])
    other = replace(TOLD, rewards=[RewardPart("exact", 1.0, {"a": [0.5, None], "b": 1})])
    assert digest_of(whole) == digest_of(other) != digest_of(TOLD)
