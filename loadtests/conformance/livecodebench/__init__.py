"""Programs, and methods of a class that are called; cases in JSON."""
