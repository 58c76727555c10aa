"""Conformance test of code grading: right and wrong solutions, judged independently."""
