"""Job that `meshrl init` copies, in `game/`, and its creation."""
