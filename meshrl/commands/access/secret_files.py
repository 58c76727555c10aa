"""`meshrl secrets`: all that lets the parts of a mesh know each other, made before any of it runs,
for an orchestrator to hand out.
"""

from __future__ import annotations

import datetime
import os
import shutil
import time
from pathlib import Path
from urllib.parse import urlsplit

from common.base.errors import Refused
from common.mesh.access import tokens
from common.mesh.access.records import HOST, PERSON
from common.mesh.access.ticket import GATEWAY_PORT, named
from common.mesh.transport.keys import KeyPair
from meshrl.commands.access.tokens import DAY_S
from meshrl.launch.head import handed_out
from meshrl.launch.head.handed_out import HandedOut
from meshrl.launch.head.invitations import write
from meshrl.launch.redis.access import material

REDIS_PORT = 6379
JOIN, SUBMIT, REDIS = "join.token", "submit.token", "redis"


def make(directory: Path, head: str, exposed: str, redis: str, days: float) -> None:
    """Makes the directory, whole or not at all, and says what is in it. Refused where there is one;
    ConfigError for a NAME[:PORT] that is none.
    """
    near = named(head, GATEWAY_PORT, "--head")
    far = named(exposed, GATEWAY_PORT, "--exposed")
    at = urlsplit(named(redis, REDIS_PORT, "--redis")) if redis else None
    if os.path.lexists(directory):
        raise Refused(
            f"{directory} is there already, and what is in it may be in use",
            fix="Name another directory: secrets that are made again are another mesh's",
        )
    fresh = directory.with_name(f".{directory.name}.{os.getpid()}")
    fresh.mkdir(parents=True, mode=0o700)
    try:
        _fill(fresh, near, far, days)
        if at is not None:
            (fresh / REDIS).mkdir(mode=0o700)
            now = datetime.datetime.now(datetime.UTC)
            netloc = at.netloc.rpartition(":")
            material.make(fresh / REDIS, netloc[0], int(netloc[2]), now)
        fresh.rename(directory)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    print(f"{directory} holds the secrets of a mesh, for your eyes alone:")
    print(f"  {handed_out.FILE}    for its head: meshrl up --secrets {handed_out.FILE}")
    print(f"  {JOIN}   for hosts, any number, for {days:g} days: meshrl join {JOIN}")
    print(f"  {SUBMIT} for people who hand in jobs: meshrl submit JOB --token {SUBMIT}")
    if at is not None:
        print(f"  {REDIS}/       for its Redis, and for the head: MESHRL_REDIS_URL=./{REDIS}/url")


def _fill(directory: Path, near: str, far: str, days: float) -> None:
    pair, now_s, lasts_s = KeyPair.new(), time.time(), days * DAY_S
    gateway = pair.public.decode()
    host, joining = tokens.made(JOIN, lasts_s, now_s, near, gateway, kind=HOST, uses=0)
    person, submitting = tokens.made(SUBMIT, lasts_s, now_s, far, gateway, kind=PERSON)
    HandedOut(gateway, pair.secret.decode(), [host, person]).write(directory / handed_out.FILE)
    write(joining, directory / JOIN)
    write(submitting, directory / SUBMIT)
