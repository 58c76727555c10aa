"""The entry of the process that hosts a job's frozen models: the role process of a scoring gang."""

from __future__ import annotations

from common.pool.seat import Seat, parser
from common.runtime.mesh import run
from services.scoring.running import main

if __name__ == "__main__":
    seat = Seat.of(parser(__doc__).parse_args())
    run(lambda: main(seat))
