"""How a gang's model is cut into rows. Open `learners.py` first."""
