"""What the grading of code is worth: rows with right and wrong solutions, judged by another."""
