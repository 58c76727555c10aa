"""A member of a broadcast that is killed when it has received one chunk. It reads on its standard
input what the core told it.
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
told = json.loads(sys.stdin.readline())
sender = BroadcastSender(**told["senders"][0])
gathered = BroadcastPlan(**told | {"senders": [sender], "backend": "gloo"})
group = BroadcastGroup(gathered, sender, {"hostname": "127.0.0.1"})
group.join(
    open_rendezvous_store(
        gathered.rendezvous_url, gathered.world_size, timedelta(seconds=gathered.max_wait_s)
    )
)
next(group.receive(sender.chunk_bytes.values()))
os.kill(os.getpid(), signal.SIGKILL)
