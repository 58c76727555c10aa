"""Generation that engine and scoring share: the contract of engines, and the built-in engine. Open
`contract.py` first.
"""
