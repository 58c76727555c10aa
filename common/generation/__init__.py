"""Generation that engine and scoring share: the contract of an engine, and the built-in one.
Open `contract.py` first."""
