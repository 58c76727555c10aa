"""How tests are run: which ones (`tiers.py`), in which processes (`workers.py`), how long they may
take (`timeouts.py`) and what they cost (`costs.py`). `conftest.py` registers these plugins.
"""

WORKER_ENV = "MESHRL_TEST_WORKER"  # number of the worker that a test runs in
