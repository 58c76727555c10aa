"""Checks of the rows of datasets: lengths and texts of prompts, golds, tests."""
