"""The reward `code_tests`. Open `grading.py` first."""
