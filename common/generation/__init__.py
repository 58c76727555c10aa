"""Generation that engine and scoring share: the contract of engines, and the built-in engine. Open
`engine_contract.py` first.
"""
