"""A process that this host cannot have says why as it ends, for whoever started it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from meshrl.common.base.host.settings import SETTINGS_ENV, MeshSettings
from meshrl.common.mesh.process.ends.failure import Failure
from meshrl.common.mesh.process.host import SystemHost
from tests.gpus.driver import Gpus
from tests.load import scaled
from tests.meshes import SECRET
from tests.unit.common.mesh.process.modules import python
from tests.unit.node.smallmesh import SmallMesh

ENDS_S = 60.0


async def refused(
    mesh: SmallMesh, settings: MeshSettings, *words: str, env: Mapping[str, str] = {}
) -> Failure:
    """The error that ends a process of the mesh under these settings."""
    path, log = mesh.directory / "refusing.json", mesh.directory / "refused.log"
    settings.to_file(path)
    host = SystemHost()
    child = host.spawn(
        python(*words), name="refused", env={**env, SETTINGS_ENV: str(path)}, log=log
    )
    assert await child.wait(scaled(ENDS_S)) == 1, log.read_text()
    failure = host.failure_of(child.pid, log)
    assert failure is not None and failure.fatal, log.read_text()
    return failure


@pytest.mark.parametrize("module", ["meshrl.services.planner", "meshrl.services.weights"])
async def test_an_address_that_is_not_of_this_host_is_named(mesh: SmallMesh, module: str) -> None:
    settings = MeshSettings(
        mesh.settings.redis_url,
        str(mesh.directory),
        bind="tcp://192.0.2.1:*",
        host="here",
        secret=SECRET,
    )
    failure = await refused(mesh, settings, module)
    assert "cannot listen on tcp://192.0.2.1:*" in failure.text
    assert failure.where == "mesh.bind" and failure.fix


@pytest.mark.deep
@pytest.mark.needs("compiler")
async def test_a_host_without_gpus_or_with_too_few_says_so(mesh: SmallMesh, gpus: Gpus) -> None:
    words = ["meshrl.services.node", "--device", "cuda", "--workers", "2"]
    failure = await refused(mesh, mesh.settings, *words, env=gpus.environment)
    assert "the driver lists 0 GPUs" in failure.text and "mesh.device" in failure.fix
    gpus.gpu("GPU-a")
    failure = await refused(mesh, mesh.settings, *words, env=gpus.environment)
    assert "2 workers are asked for, and there are 1 GPUs" in failure.text
    gpus.gpu("GPU-b")
    hidden = gpus.environment | {"CUDA_VISIBLE_DEVICES": "GPU-b"}
    failure = await refused(mesh, mesh.settings, *words, env=hidden)
    assert "there are 1 GPUs (cuda:1 NVIDIA H100)" in failure.text
