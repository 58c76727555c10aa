"""Container engine for machines with only Debian's archive: no image registry, no service.

Usage:

    python -m tests.deploy.engine start DIR     an engine, its state in DIR; prints its variables
    python -m tests.deploy.engine base DIR      the image that the tests' images begin from
    python -m tests.deploy.engine stop DIR      ends it, and nothing else

It lives in a network namespace of its own, whose way out is a process (slirp4netns), so that the
machine's interfaces, rules and settings stay as they are. What it publishes is reached from within
the namespace: `nsenter --net=/run/netns/...`, which `start` prints as MESHRL_ENGINE_ENTER.
"""
