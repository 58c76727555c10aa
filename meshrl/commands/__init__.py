"""Implementations of commands without their own room; `meshrl/cli` declares their arguments."""
