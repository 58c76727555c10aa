"""A member of a broadcast that is killed when it has received one chunk. It reads on its standard
input what the core told it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta

from common.weights.ways.group import BroadcastGroup
from common.weights.ways.meeting import store_at

print("ready", flush=True)
told = json.loads(sys.stdin.readline())
store = store_at(told["where"], told["members"], timedelta(seconds=told["wait_s"]))
(sender,) = told["senders"]
place = {"hostname": "127.0.0.1"}
group = BroadcastGroup(
    store, sender["name"], told["rank"], told["members"], "gloo", place, told["wait_s"]
)
next(group.receive(sender["chunks"].values()))
os.kill(os.getpid(), signal.SIGKILL)
