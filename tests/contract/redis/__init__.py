"""Contract of the simulated Redis: commands, scripts, JSON and a full server."""
