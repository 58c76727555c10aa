"""Model of attention on new accelerators and experts on old ones, on the setups of HeterMoE. Open
`paper_setups.py` first.
"""
