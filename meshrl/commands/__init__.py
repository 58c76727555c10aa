"""What commands do that have no room of their own; `meshrl/cli` declares their arguments."""
