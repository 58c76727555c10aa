"""Entry point of an engine process: the role process of a worker in the rollout role."""

from __future__ import annotations

from meshrl.common.mesh.runtime.mesh import run_service
from meshrl.common.state.pool.workers.placement import Placement, build_parser
from meshrl.services.engine.role_process import main

if __name__ == "__main__":
    placement = Placement.from_args(build_parser(__doc__).parse_args())
    run_service(lambda: main(placement))
