"""What `meshrl init` writes: `game/` is the job, as it is copied."""
