"""Commands on a run that there is already."""
