"""Member of a broadcast that is killed after its first chunk. It reads the broadcast plan of the
core from its standard input.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta

from meshrl.common.api.trainer import BroadcastPlan, BroadcastSender
from meshrl.common.weights.transports.collective import BroadcastGroup
from meshrl.common.weights.transports.rendezvous import open_rendezvous_store

print("ready", flush=True)
fields = json.loads(sys.stdin.readline())
sender = BroadcastSender(**fields["senders"][0])
plan = BroadcastPlan(**fields | {"senders": [sender], "backend": "gloo"})
group = BroadcastGroup(plan, sender, {"hostname": "127.0.0.1"})
group.join(
    open_rendezvous_store(plan.rendezvous_url, plan.world_size, timedelta(seconds=plan.max_wait_s))
)
next(group.receive(sender.chunk_bytes.values()))
os.kill(os.getpid(), signal.SIGKILL)
