"""The entry of the process that hosts a job's frozen models: the role process of a scoring gang."""

from __future__ import annotations

from meshrl.common.mesh.runtime.mesh import run
from meshrl.common.state.pool.workers.seat import Seat, parser
from meshrl.services.scoring.running import main

if __name__ == "__main__":
    seat = Seat.of(parser(__doc__).parse_args())
    run(lambda: main(seat))
