"""Entry point of a scoring gang's role process, which hosts a job's frozen models."""

from __future__ import annotations

from meshrl.common.mesh.runtime.mesh import run_service
from meshrl.common.state.pool.workers.placement import Placement, build_parser
from meshrl.services.scoring.role_process import run_scoring

if __name__ == "__main__":
    placement = Placement.from_args(build_parser(__doc__).parse_args())
    run_service(lambda: run_scoring(placement))
