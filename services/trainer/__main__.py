"""The entry of a training process: the core, a further rank of its gang, or a hybrid."""

from __future__ import annotations

from meshrl.common.mesh.runtime.mesh import run
from meshrl.common.state.pool.workers.seat import Seat, parser
from meshrl.services.trainer.running import main

if __name__ == "__main__":
    seat = Seat.of(parser(__doc__).parse_args())
    run(lambda: main(seat))
