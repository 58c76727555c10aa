"""Generation code of engines and scoring: the engine contract and the built-in engine. Open
`engine_contract.py` first.
"""
