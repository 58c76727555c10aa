"""System calls that jails refuse."""
