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

from meshrl.common.api.engine import FinishReason
from meshrl.common.base.errors import MeshError, Refused
from meshrl.common.base.expert_routing import NO_EXPERTS, concatenate_experts

if TYPE_CHECKING:
    from torch import Tensor

    from meshrl.common.generation.prefix_loading import PrefixLoad

NO_VERSION = -1  # of an engine that holds no whole version
MIXED_VERSIONS = -1  # version of a cache that weights of several versions computed
NO_SESSION = -1  # any negative session: nothing is kept after the request

IntArray = NDArray[np.integer]
FloatArray = NDArray[np.floating]
NO_FLOATS = np.zeros(0, np.float32)


class Quarantined(MeshError):
    """New weights did not arrive whole: nobody knows what the engine holds, so it answers nothing
    until a whole version is in place.
    """

    code = "engine_quarantined"


@contextmanager
def quarantine_on_error(version: int, quarantine: Callable[[], None]) -> Iterator[None]:
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
class GenerationRequest:
    """Generate after `tokens` until a stop id (which is included), `max_new` tokens or a full slot.

    What is sampled depends on the weights, `tokens`, `seed` and positions only: the same request
    resubmitted with its first results appended to `tokens` goes on as it would have.
    """

    id: int
    tokens: NDArray[np.int32]
    max_new_tokens: int
    temperature: float  # 0: greedy, with the log-probabilities of temperature 1
    stop_ids: tuple[int, ...]
    seed: int
    session: int  # requests of one session follow each other; the next finds what this one computed
    top_p: float = 1.0  # share of the probability that is kept, likeliest first; 1: all
    top_k: int = 0  # likeliest tokens that are kept; 0: all
    min_p: float = 0.0  # kept: at least so likely as this times the likeliest; 0: all
    stop_strings: tuple[str, ...] = ()  # the token that completes one of these is the last
    turn_start: int = -1  # place in `tokens` from which on they were generated too; -1: none
    wants_raw_logprobs: bool = (
        False  # log-probabilities at temperature 1, nothing left out, come too
    )
    adapter: str = ""  # a loaded one, beside the base; empty: the base alone


@dataclass(slots=True)
class EngineOutput:
    """New tokens of n requests, in order of `ids`: request i owns the next `counts[i]` entries."""

    ids: NDArray[np.int64]
    counts: NDArray[np.int32]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]  # under the distribution that was sampled from
    raw_logprobs: NDArray[np.float32]  # at temperature 1; nan where not asked for, empty if nowhere
    versions: NDArray[np.int32]  # the weights that sampled each token
    finish_reasons: NDArray[np.int8]
    # [tokens, sparse layers x k]: where a mixture of experts sent the place that predicted each
    # token; `meshrl.common.base.expert_routing` says what stands for none.
    experts: NDArray[np.int16] = field(default_factory=lambda: NO_EXPERTS)


@dataclass(slots=True)
class RequestOutput:
    """One request's share of a flush."""

    id: int
    tokens: IntArray
    logprobs: FloatArray
    versions: IntArray
    finish_reason: FinishReason = FinishReason.RUNNING
    raw_logprobs: FloatArray | None = None
    experts: NDArray[np.int16] | None = None


@dataclass(frozen=True, slots=True)
class SessionCache:
    """What an engine has computed of a session, so that another one of the same model can tell
    whether it can take the keys and values of `tokens`."""

    tokens: NDArray[np.int32]  # [n], all that is computed
    layout: str  # path, dtype, order, shape; an engine of another layout does not take it
    version: int  # the weights that computed the n tokens; MIXED: several did
    first_sampled_index: int  # place of the first of `tokens` that an engine sampled; n: none
    first_version: int  # the weights that sampled that one
    adapter: str = ""  # with which they computed; its versions are meant then


class SteppableEngine(Protocol):
    """The steps of an engine, and what they bring: at its own speed, or at an emulated one."""

    @property
    def backend(self) -> str:
        """The name of what computes, for people to read."""

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks that share the weights of one engine."""

    @property
    def busy_s(self) -> float:
        """Seconds spent in steps that computed something."""

    @property
    def has_finished(self) -> bool:
        """Whether a request has ended since the last drain."""

    @property
    def next_step_delay_s(self) -> float:
        """Seconds that may pass before the next step brings anything; 0: step at once."""

    @property
    def prefill_tokens_per_s(self) -> float:
        """Known tokens computed in a second, as measured lately; 0: not yet."""

    def step(self) -> bool:
        """Brings a token or a few for each request that runs; False when paused, asleep,
        quarantined or without work.
        """

    def drain_outputs(self, finished_only: bool = False) -> EngineOutput | None:
        """What has come since the last drain, each token once; of ended requests only, or all."""


class TokenEngine(SteppableEngine, Protocol):
    """The contract. One thread drives an engine: `step` until it returns False, `drain` at any
    time.
    """

    @property
    def num_preempted(self) -> int:
        """Requests so far that gave up their cache to older ones."""

    @property
    def version(self) -> int:
        """The version of the loaded weights, those of the base where adapters lie beside it;
        NO_VERSION when there is no whole one.
        """

    @property
    def adapter_versions(self) -> Mapping[str, int]:
        """The versions of the adapters that are loaded beside the base, by their names."""

    @property
    def num_running(self) -> int:
        """The number of requests that are being generated."""

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait for room."""

    @property
    def tokens_generated(self) -> int:
        """Tokens sampled so far."""

    @property
    def tokens_computed(self) -> int:
        """Tokens that went through the model, given or sampled; what was cached does not count."""

    @property
    def num_steps(self) -> int:
        """Steps of the batch so far."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Takes all requests or none (Refused, naming one). An id that is in work is left alone."""

    def abort(self, ids: Iterable[int]) -> None:
        """Ends these requests with ABORTED; what they had generated is still flushed."""

    def release_sessions(self, sessions: Iterable[int]) -> None:
        """Frees the slots of sessions that have ended."""

    def update_weights(self, state: Mapping[str, Tensor], version: int) -> None:
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

    def score(self, tokens: IntArray, adapter: str = "") -> NDArray[np.float32]:
        """Log-probability, at temperature 1, of each token after the first: length n - 1."""

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values; 0: they cannot be moved."""

    def describe_session_cache(self, session: int) -> SessionCache | None:
        """What it has computed of an idle session; None: nothing that could be taken over."""

    def copy_session_cache(self, session: int, start: int, end: int) -> NDArray[np.uint8] | None:
        """A copy of the keys and values of tokens [start, end) of an idle session, of its layout;
        `start` begins a chunk. None: it has them no more.
        """

    def expect_load(self, session: int, load: PrefixLoad) -> None:
        """The session's next request, or the one that is being prefilled, may be loaded by `load`:
        an `offer` follows, or its end.
        """

    def offer_load(self, session: int, cache: SessionCache, load: PrefixLoad) -> bool:
        """Has the session's next request, or the one that is being prefilled, loaded by `load` as
        far as that is faster; `load.alone` says whether some of the cache is of other weights.
        False, and the load is cancelled: it must not or cannot be used here.
        """


class WithoutCacheTransfer:
    """The part of the contract that is about keys and values of others, for an engine of which
    nobody can read them."""

    def describe_session_cache(self, session: int) -> SessionCache | None:
        """Nothing."""
        return None

    def copy_session_cache(self, session: int, start: int, end: int) -> NDArray[np.uint8] | None:
        """Nothing."""
        return None

    def expect_load(self, session: int, load: PrefixLoad) -> None:
        """Nothing of it is wanted."""
        load.is_cancelled = True

    def offer_load(self, session: int, cache: SessionCache, load: PrefixLoad) -> bool:
        """It cannot be used."""
        load.is_cancelled = True
        return False


def combine_outputs(pieces: Sequence[RequestOutput]) -> EngineOutput | None:
    """The pieces as one flush, in their order; None: there are none."""
    if not pieces:
        return None
    asked = any(p.raw_logprobs is not None for p in pieces)
    return EngineOutput(
        ids=np.array([p.id for p in pieces], np.int64),
        counts=np.array([len(p.tokens) for p in pieces], np.int32),
        tokens=np.concatenate([p.tokens for p in pieces], dtype=np.int32, casting="same_kind"),
        logprobs=np.concatenate([p.logprobs for p in pieces], dtype=np.float32),
        raw_logprobs=np.concatenate(
            [_fill_raw_logprobs(p) for p in pieces] if asked else [NO_FLOATS]
        ),
        versions=np.concatenate([p.versions for p in pieces], dtype=np.int32, casting="same_kind"),
        finish_reasons=np.array([p.finish_reason for p in pieces], np.int8),
        experts=concatenate_experts(
            [(NO_EXPERTS if p.experts is None else p.experts, len(p.tokens)) for p in pieces]
        ),
    )


def concatenate_outputs(first: EngineOutput, second: EngineOutput) -> EngineOutput:
    """Both flushes as one, the first before the second."""
    unmodified = NO_FLOATS
    if len(first.raw_logprobs) or len(second.raw_logprobs):
        unmodified = np.concatenate(
            [
                f.raw_logprobs
                if len(f.raw_logprobs)
                else np.full(len(f.tokens), np.nan, np.float32)
                for f in (first, second)
            ]
        )
    return EngineOutput(
        ids=np.concatenate((first.ids, second.ids)),
        counts=np.concatenate((first.counts, second.counts)),
        tokens=np.concatenate((first.tokens, second.tokens)),
        logprobs=np.concatenate((first.logprobs, second.logprobs)),
        raw_logprobs=unmodified,
        versions=np.concatenate((first.versions, second.versions)),
        finish_reasons=np.concatenate((first.finish_reasons, second.finish_reasons)),
        experts=concatenate_experts([(f.experts, len(f.tokens)) for f in (first, second)]),
    )


def select_requests(output: EngineOutput, mask: NDArray[np.bool_]) -> EngineOutput:
    """The part of a flush that belongs to the requests of `rows`."""
    tokens = np.repeat(mask, output.counts)
    return EngineOutput(
        ids=output.ids[mask],
        counts=output.counts[mask],
        tokens=output.tokens[tokens],
        logprobs=output.logprobs[tokens],
        raw_logprobs=output.raw_logprobs[tokens]
        if len(output.raw_logprobs)
        else output.raw_logprobs,
        versions=output.versions[tokens],
        finish_reasons=output.finish_reasons[mask],
        experts=output.experts[tokens] if len(output.experts) else output.experts,
    )


def _fill_raw_logprobs(piece: RequestOutput) -> NDArray[np.float32]:
    if piece.raw_logprobs is None:
        return np.full(len(piece.tokens), np.nan, np.float32)
    return piece.raw_logprobs.astype(np.float32)


def check_request(
    request: GenerationRequest,
    vocab_size: int,
    adapters: Container[str] = (),
    absent_ids: Sequence[tuple[int, int]] = (),
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
    elif any(((first <= tokens) & (tokens < end)).any() for first, end in absent_ids):
        reason = "it has a token id that the tokenizer lacks"
    elif not request.temperature >= 0:
        reason = f"temperature {request.temperature} is not a number >= 0"
    elif not 0 < request.top_p <= 1:
        reason = f"top_p {request.top_p} is not in (0, 1]"
    elif not 0 <= request.min_p <= 1:
        reason = f"min_p {request.min_p} is not in [0, 1]"
    elif request.top_k < 0:
        reason = f"top_k {request.top_k} is negative"
    elif "" in request.stop_strings:
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


def adapter_in_use_error(adapter: str) -> Refused:
    """The error of an adapter that requests in work have."""
    return Refused(f"adapter {adapter!r} is in use", where="engine", fix="abort its requests first")


def sequence_too_long_error(tokens: int, max_tokens: int) -> Refused:
    """The error of a sequence that is longer than a slot."""
    return Refused(
        f"{tokens} tokens are more than a slot of {max_tokens} holds",
        where="engine",
        fix="raise rollout.max_tokens",
    )


def no_weights_error() -> Refused:
    """The error of an engine that has no whole version, or sleeps."""
    return Refused("the engine has no weights", where="engine", fix="wake it first")
