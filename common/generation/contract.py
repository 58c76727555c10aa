"""The contract of every engine, whatever it computes with: requests in, tokens out, weights
swapped.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from meshrl.common.api.engine import Finish
from meshrl.common.base.errors import MeshError, Refused
from meshrl.common.base.experts import NO_EXPERTS, laid_out

if TYPE_CHECKING:
    from torch import Tensor

    from meshrl.common.generation.loading import Loading

NO_VERSION = -1  # of an engine that holds no whole version
MIXED = -1  # version of a cache that weights of several versions computed
NO_SESSION = -1  # any negative session: nothing is kept after the request

Ints = NDArray[np.integer]
Floats = NDArray[np.floating]
NO_FLOATS = np.zeros(0, np.float32)


class Quarantined(MeshError):
    """New weights did not arrive whole: nobody knows what the engine holds, so it answers nothing
    until a whole version is in place.
    """

    code = "engine_quarantined"


@contextmanager
def replacing(version: int, quarantine: Callable[[], None]) -> Iterator[None]:
    """The time in which an engine's weights are replaced. Quarantined, after `quarantine` was
    called, for whatever ends it early.
    """
    try:
        yield
    # Nobody can name all that a device, a disk or a server raises, and after any of it some tensors
    # are of one version and the rest of another.
    except Exception as error:
        quarantine()
        raise Quarantined(
            f"version {version} did not arrive whole: {error}",
            where="engine",
            fix="It generates nothing until it has a whole version, which it asks for again",
        ) from error


@dataclass(slots=True)
class Request:
    """Generate after `tokens` until a stop id (which is included), `max_new` tokens or a full slot.

    What is sampled depends on the weights, `tokens`, `seed` and positions only: the same request
    resubmitted with its first results appended to `tokens` goes on as it would have.
    """

    id: int
    tokens: NDArray[np.int32]
    max_new: int
    temperature: float  # 0: greedy, with the log-probabilities of temperature 1
    stop_ids: tuple[int, ...]
    seed: int
    session: int  # requests of one session follow each other; the next finds what this one computed
    top_p: float = 1.0  # share of the probability that is kept, likeliest first; 1: all
    top_k: int = 0  # likeliest tokens that are kept; 0: all
    min_p: float = 0.0  # kept: at least so likely as this times the likeliest; 0: all
    stop_text: tuple[str, ...] = ()  # the token that completes one of these is the last
    begin: int = -1  # place in `tokens` from which on they were generated too; -1: none
    unmodified: bool = False  # log-probabilities at temperature 1, nothing left out, come too
    adapter: str = ""  # a loaded one, beside the base; empty: the base alone


@dataclass(slots=True)
class Flush:
    """New tokens of n requests, in order of `ids`: request i owns the next `counts[i]` entries."""

    ids: NDArray[np.int64]
    counts: NDArray[np.int32]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]  # under the distribution that was sampled from
    unmodified: NDArray[np.float32]  # at temperature 1; nan where not asked for, empty if nowhere
    versions: NDArray[np.int32]  # the weights that sampled each token
    finish: NDArray[np.int8]
    # [tokens, sparse layers x k]: where a mixture of experts sent the place that predicted each
    # token; `meshrl.common.base.experts` says what stands for none.
    experts: NDArray[np.int16] = field(default_factory=lambda: NO_EXPERTS)


@dataclass(slots=True)
class FlushPiece:
    """One request's share of a flush."""

    id: int
    tokens: Ints
    logprobs: Floats
    versions: Ints
    finish: Finish = Finish.RUNNING
    unmodified: Floats | None = None
    experts: NDArray[np.int16] | None = None


@dataclass(frozen=True, slots=True)
class SessionCache:
    """What an engine has computed of a session, so that another one of the same model can tell
    whether it can take the keys and values of `tokens`."""

    tokens: NDArray[np.int32]  # [n], all that is computed
    layout: str  # path, dtype, order, shape; an engine of another layout does not take it
    version: int  # the weights that computed the n tokens; MIXED: several did
    first_sampled: int  # place of the first of `tokens` that an engine sampled; n: none
    first_version: int  # the weights that sampled that one
    adapter: str = ""  # with which they computed; its versions are meant then


class EngineSteps(Protocol):
    """The steps of an engine, and what they bring: at its own speed, or at an emulated one."""

    @property
    def path(self) -> str:
        """The name of what computes, for people to read."""

    @property
    def tensor_parallel(self) -> int:
        """Ranks that share the weights of one engine."""

    @property
    def busy_s(self) -> float:
        """Seconds spent in steps that computed something."""

    @property
    def ended(self) -> bool:
        """Whether a request has ended since the last drain."""

    @property
    def due_s(self) -> float:
        """Seconds that may pass before the next step brings anything; 0: step at once."""

    @property
    def prefill_tokens_per_s(self) -> float:
        """Known tokens computed in a second, as measured lately; 0: not yet."""

    def step(self) -> bool:
        """Brings a token or a few for each request that runs; False when paused, asleep,
        quarantined or without work.
        """

    def drain(self, ended_only: bool = False) -> Flush | None:
        """What has come since the last drain, each token once; of ended requests only, or all."""


class TokenEngine(EngineSteps, Protocol):
    """The contract. One thread drives an engine: `step` until it returns False, `drain` at any
    time.
    """

    @property
    def preempted(self) -> int:
        """Requests so far that gave up their cache to older ones."""

    @property
    def version(self) -> int:
        """The version of the loaded weights, those of the base where adapters lie beside it;
        NO_VERSION when there is no whole one.
        """

    @property
    def adapters(self) -> Mapping[str, int]:
        """The versions of the adapters that are loaded beside the base, by their names."""

    @property
    def running(self) -> int:
        """The number of requests that are being generated."""

    @property
    def waiting(self) -> int:
        """The number of requests that wait for room."""

    @property
    def tokens_generated(self) -> int:
        """Tokens sampled so far."""

    @property
    def tokens_computed(self) -> int:
        """Tokens that went through the model, given or sampled; what was cached does not count."""

    @property
    def steps(self) -> int:
        """Steps of the batch so far."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Takes all requests or none (Refused, naming one). An id that is in work is left alone."""

    def abort(self, ids: Iterable[int]) -> None:
        """Ends these requests with ABORTED; what they had generated is still flushed."""

    def release(self, sessions: Iterable[int]) -> None:
        """Frees the slots of sessions that have ended."""

    def swap(self, state: Mapping[str, Tensor], version: int) -> None:
        """Loads new weights, which hold from the next step on. Refused, and nothing changes, when
        they do not fit. Quarantined when they did not arrive whole: the version is NO_VERSION then,
        `step` does nothing, `score` refuses, and what runs waits, until a swap or wake succeeds.
        """

    def load_adapter(
        self, name: str, tensors: Mapping[str, Tensor], scale: float, version: int
    ) -> None:
        """Puts an adapter, or a new version of one, beside the base: factors A and B by name
        (`meshrl.common.model.network.lora`), which act as scale * B A. It stays over `swap`,
        `sleep` and `wake`. Requests that run go on, with the new version from the next step on or,
        where a server has it so, with the one that they began with: their tokens carry the version
        that sampled them. Refused when it does not fit the model, or no more fit.
        """

    def quarantine(self) -> None:
        """Makes it an engine without a whole version, as after a swap that was Quarantined: to be
        called where the next of several changes that belong together cannot be made.
        """

    def unload_adapter(self, name: str) -> None:
        """Frees an adapter; Refused while requests with it are in work. One that is not there is
        no error."""

    def pause(self) -> None:
        """Makes `step` do nothing until `resume`."""

    def resume(self) -> None:
        """Lets `step` run again after `pause`."""

    def sleep(self) -> None:
        """Gives back the memory of weights and cache; what runs waits and loses no token."""

    def wake(self, state: Mapping[str, Tensor], version: int) -> None:
        """Takes weights again, of any version, and goes on."""

    def score(self, tokens: Ints, adapter: str = "") -> NDArray[np.float32]:
        """Log-probability, at temperature 1, of each token after the first: length n - 1."""

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values; 0: they cannot be moved."""

    def cached(self, session: int) -> SessionCache | None:
        """What it has computed of an idle session; None: nothing that could be taken over."""

    def copied(self, session: int, start: int, end: int) -> NDArray[np.uint8] | None:
        """A copy of the keys and values of tokens [start, end) of an idle session, of its layout;
        `start` begins a chunk. None: it has them no more.
        """

    def expect(self, session: int, load: Loading) -> None:
        """The session's next request, or the one that is being prefilled, may be loaded by `load`:
        an `offer` follows, or its end.
        """

    def offer(self, session: int, cache: SessionCache, load: Loading) -> bool:
        """Has the session's next request, or the one that is being prefilled, loaded by `load` as
        far as that is faster; `load.alone` says whether some of the cache is of other weights.
        False, and the load is cancelled: it must not or cannot be used here.
        """


class Unshared:
    """The part of the contract that is about keys and values of others, for an engine of which
    nobody can read them."""

    def cached(self, session: int) -> SessionCache | None:
        """Nothing."""
        return None

    def copied(self, session: int, start: int, end: int) -> NDArray[np.uint8] | None:
        """Nothing."""
        return None

    def expect(self, session: int, load: Loading) -> None:
        """Nothing of it is wanted."""
        load.cancelled = True

    def offer(self, session: int, cache: SessionCache, load: Loading) -> bool:
        """It cannot be used."""
        load.cancelled = True
        return False


def flush_of(pieces: Sequence[FlushPiece]) -> Flush | None:
    """The pieces as one flush, in their order; None: there are none."""
    if not pieces:
        return None
    asked = any(p.unmodified is not None for p in pieces)
    return Flush(
        ids=np.array([p.id for p in pieces], np.int64),
        counts=np.array([len(p.tokens) for p in pieces], np.int32),
        tokens=np.concatenate([p.tokens for p in pieces], dtype=np.int32, casting="same_kind"),
        logprobs=np.concatenate([p.logprobs for p in pieces], dtype=np.float32),
        unmodified=np.concatenate([_unmodified(p) for p in pieces] if asked else [NO_FLOATS]),
        versions=np.concatenate([p.versions for p in pieces], dtype=np.int32, casting="same_kind"),
        finish=np.array([p.finish for p in pieces], np.int8),
        experts=laid_out(
            [(NO_EXPERTS if p.experts is None else p.experts, len(p.tokens)) for p in pieces]
        ),
    )


def joined(first: Flush, second: Flush) -> Flush:
    """Both flushes as one, the first before the second."""
    unmodified = NO_FLOATS
    if len(first.unmodified) or len(second.unmodified):
        unmodified = np.concatenate(
            [
                f.unmodified if len(f.unmodified) else np.full(len(f.tokens), np.nan, np.float32)
                for f in (first, second)
            ]
        )
    return Flush(
        ids=np.concatenate((first.ids, second.ids)),
        counts=np.concatenate((first.counts, second.counts)),
        tokens=np.concatenate((first.tokens, second.tokens)),
        logprobs=np.concatenate((first.logprobs, second.logprobs)),
        unmodified=unmodified,
        versions=np.concatenate((first.versions, second.versions)),
        finish=np.concatenate((first.finish, second.finish)),
        experts=laid_out([(f.experts, len(f.tokens)) for f in (first, second)]),
    )


def rows_of(flush: Flush, rows: NDArray[np.bool_]) -> Flush:
    """The part of a flush that belongs to the requests of `rows`."""
    tokens = np.repeat(rows, flush.counts)
    return Flush(
        ids=flush.ids[rows],
        counts=flush.counts[rows],
        tokens=flush.tokens[tokens],
        logprobs=flush.logprobs[tokens],
        unmodified=flush.unmodified[tokens] if len(flush.unmodified) else flush.unmodified,
        versions=flush.versions[tokens],
        finish=flush.finish[rows],
        experts=flush.experts[tokens] if len(flush.experts) else flush.experts,
    )


def _unmodified(piece: FlushPiece) -> NDArray[np.float32]:
    if piece.unmodified is None:
        return np.full(len(piece.tokens), np.nan, np.float32)
    return piece.unmodified.astype(np.float32)


def check(
    request: Request,
    vocab_size: int,
    adapters: Container[str] = (),
    absent: Sequence[tuple[int, int]] = (),
) -> None:
    """Refused, with the reason, when no engine that has these adapters could serve this request.

    `absent`: ranges of ids that the tokenizer lacks, as in `ModelConfig`.
    """
    tokens = request.tokens
    reason = ""
    if tokens.ndim != 1 or len(tokens) == 0:
        reason = f"it needs at least one token in one dimension, not shape {tokens.shape}"
    elif int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        reason = f"its tokens are not all in [0, {vocab_size})"
    elif any(((first <= tokens) & (tokens < end)).any() for first, end in absent):
        reason = "it has a token id that the tokenizer lacks"
    elif not request.temperature >= 0:
        reason = f"temperature {request.temperature} is not a number >= 0"
    elif not 0 < request.top_p <= 1:
        reason = f"top_p {request.top_p} is not in (0, 1]"
    elif not 0 <= request.min_p <= 1:
        reason = f"min_p {request.min_p} is not in [0, 1]"
    elif request.top_k < 0:
        reason = f"top_k {request.top_k} is negative"
    elif "" in request.stop_text:
        reason = "an empty text would stop it before it begins"
    if request.adapter and request.adapter not in adapters:
        raise Refused(
            f"request {request.id} cannot be served: adapter {request.adapter!r} is not loaded",
            where="engine",
            fix="load it first, or name none for the base model",
        )
    if reason:
        raise Refused(
            f"request {request.id} cannot be served: {reason}",
            where="engine",
            fix="check the tokenizer against the model's vocabulary, and the sampling settings",
        )


def in_use(adapter: str) -> Refused:
    """The error of an adapter that requests in work have."""
    return Refused(f"adapter {adapter!r} is in use", where="engine", fix="abort its requests first")


def too_long(tokens: int, most: int) -> Refused:
    """The error of a sequence that is longer than a slot."""
    return Refused(
        f"{tokens} tokens are more than a slot of {most} holds",
        where="engine",
        fix="raise rollout.max_tokens",
    )


def no_weights() -> Refused:
    """The error of an engine that has no whole version, or sleeps."""
    return Refused("the engine has no weights", where="engine", fix="wake it first")
