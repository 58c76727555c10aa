"""Where a turn goes: which engine, when, and whether its cache goes along. Open `router.py`
first."""
