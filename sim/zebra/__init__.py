"""Attention on new accelerators and experts on old ones, modelled on the setups of HeterMoE. Open
`paper_setups.py` first.
"""
