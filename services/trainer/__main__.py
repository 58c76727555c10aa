"""Entry point of a training process: the core, a further rank of its gang, or a hybrid."""

from __future__ import annotations

from meshrl.common.mesh.runtime.mesh import run_service
from meshrl.common.state.pool.workers.placement import Placement, build_parser
from meshrl.services.trainer.role_process import main

if __name__ == "__main__":
    placement = Placement.from_args(build_parser(__doc__).parse_args())
    run_service(lambda: main(placement))
