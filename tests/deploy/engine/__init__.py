"""Container engine for machines with only Debian's archive: no image registry, no service.

Usage:

    python -m tests.deploy.engine start DIR     start an engine in DIR; print its variables
    python -m tests.deploy.engine base DIR      build the base image of the tests' images
    python -m tests.deploy.engine stop DIR      stop the engine, and nothing else

The engine runs in its own network namespace, which a process (slirp4netns) connects to the outside.
The machine's interfaces, rules and settings stay unchanged. Published ports are reached from within
the namespace: `nsenter --net=/run/netns/...`, which `start` prints as MESHRL_ENGINE_ENTER.
"""
