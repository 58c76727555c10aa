"""Entry point of an environment process, which a rollout shard starts."""

from __future__ import annotations

from meshrl.services.environment.environments import main

if __name__ == "__main__":
    main()
