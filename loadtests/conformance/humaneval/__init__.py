"""One function, and assertions in `check(candidate)`."""
