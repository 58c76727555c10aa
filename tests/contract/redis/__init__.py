"""The simulated Redis answers as the real servers do: commands, scripts, JSON, a full server."""
