"""What a resident of a gang does at its worker's word: sleeps, wakes, and computes in turn. Open
`tiers.py` first.
"""
