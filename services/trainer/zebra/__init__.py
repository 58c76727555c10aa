"""Training a mixture of experts on two kinds of accelerators: attention on the fast ones, experts
on the slow ones. Open `learner.py` first.
"""
