"""The arms: each takes a `Plan` and returns figures. `one_host.py` is the simplest."""
