"""The entry of an engine process: the role process of a worker in the rollout role."""

from __future__ import annotations

from meshrl.common.mesh.runtime.mesh import run
from meshrl.common.state.pool.workers.seat import Seat, parser
from meshrl.services.engine.running import main

if __name__ == "__main__":
    seat = Seat.of(parser(__doc__).parse_args())
    run(lambda: main(seat))
