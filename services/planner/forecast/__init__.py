"""Prediction of the seconds of a job's step for any split of its workers. Open `prediction.py`
first.
"""
