"""Runner of tests in a jail of their own. Open `runner.py` first."""
