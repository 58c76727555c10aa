"""Terms of a loss, from which algorithms are composed. Open `terms.py` first."""
