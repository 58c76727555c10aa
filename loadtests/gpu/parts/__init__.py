"""Parts of the check. `CASES` of each module are functions by name, from settings to figures."""
