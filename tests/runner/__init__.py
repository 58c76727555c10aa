"""Plugins that run the tests; `plugins.py` registers them.

`tiers.py` chooses tests, `workers.py` runs them in processes, `timeouts.py` limits how long they
take, and `costs.py` counts their CPU time.
"""

WORKER_ENV = "MESHRL_TEST_WORKER"  # number of the worker that a test runs in
