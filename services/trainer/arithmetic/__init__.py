"""What is computed: bins in, gradients and steps of the optimizer out. Open `learner.py` first."""
