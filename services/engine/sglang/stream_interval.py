"""Number of tokens that the server sends together, by the measured rate of its requests."""

from __future__ import annotations

# Tokens of a batch: at least as many as an engine's flush has at most, and at most 32. In between,
# as many as a request samples in the interval at which a shard's ledger is synced. A lost engine
# repeats at most a batch of each request.
MIN_STREAM_INTERVAL, MAX_STREAM_INTERVAL = 8, 32
BATCH_S = 0.05
RATE_WINDOW_TOKENS = 4096  # tokens after which a rate's older half counts half


class TokenRate:
    """Average seconds from token to token of one request, over the last thousands of tokens."""

    def __init__(self) -> None:
        self._request_s = self._tokens = 0.0
        self._last_s, self._running = 0.0, 0

    def add_time(self, now_s: float, running: int) -> None:
        """Count the time since the last call for the requests that ran then and now."""
        self._request_s += (now_s - self._last_s) * min(self._running, running)
        self._last_s, self._running = now_s, running

    def add_tokens(self, tokens: int) -> None:
        self._tokens += tokens
        if self._tokens > RATE_WINDOW_TOKENS:
            self._tokens, self._request_s = self._tokens / 2, self._request_s / 2

    @property
    def token_s(self) -> float:
        """Seconds between two tokens of a request; 0: unknown."""
        return self._request_s / self._tokens if self._tokens else 0.0


def choose_stream_interval(token_s: float) -> int:
    """Return the tokens of a batch for requests of one token each `token_s` seconds; 0: unknown."""
    tokens = int(BATCH_S / token_s) if token_s else 0
    return max(MIN_STREAM_INTERVAL, min(MAX_STREAM_INTERVAL, tokens))
