"""Contract of every engine: requests in, tokens out, weights updated."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from meshrl.common.api.engine import NO_ADJUSTMENTS, FinishReason, LogitAdjustments
from meshrl.common.base.errors import MeshError, Refused
from meshrl.common.base.expert_routing import NO_EXPERTS, concatenate_experts
from meshrl.common.base.files.releasable_memory import ReleasableMemory

if TYPE_CHECKING:
    from torch import Tensor

    from meshrl.common.generation.prefix_loading import PrefixLoad

NO_VERSION = -1  # version of an engine without a complete version
MIXED_VERSIONS = -1  # version of a cache that weights of several versions computed
NO_SESSION = -1  # any negative session: no cache is retained after the request

IntArray = NDArray[np.integer]
FloatArray = NDArray[np.floating]
NO_FLOATS = np.zeros(0, np.float32)


class Quarantined(MeshError):
    """Error of an engine whose new weights did not arrive completely.

    Its weights are undefined, so it computes nothing until a complete version is loaded.
    """

    code = "engine_quarantined"


@contextmanager
def quarantine_on_error(version: int, quarantine: Callable[[], None]) -> Iterator[None]:
    """Guard the replacement of an engine's weights.

    On any error, call `quarantine` and raise Quarantined.
    """
    try:
        yield
    # The errors of a device, a disk or a server cannot be listed. After any of them, some tensors
    # are of one version and the rest of another.
    except Exception as error:
        quarantine()
        raise Quarantined(
            f"version {version} did not arrive completely: {error}",
            where="engine",
            fix="Wait: the engine requests a complete version again, and generates nothing before",
        ) from error


@dataclass(slots=True)
class GenerationRequest:
    """Request to generate after `tokens`.

    It ends at a stop id (which is included), after `max_new_tokens` or at a full slot. The sampled
    tokens depend on the weights, `tokens`, `seed` and positions only: a resubmitted request with
    its first results appended to `tokens` continues as it would have.
    """

    id: int
    tokens: NDArray[np.int32]
    max_new_tokens: int
    temperature: float  # 0: greedy, with the log-probabilities of temperature 1
    stop_ids: tuple[int, ...]
    seed: int
    session: int  # requests of one session follow each other; the next finds what this one computed
    top_p: float = 1.0  # top-p: share of the probability that is retained, likeliest first; 1: all
    top_k: int = 0  # top-k: number of likeliest tokens that are retained; 0: all
    min_p: float = 0.0  # min-p: least probability relative to the likeliest token; 0: all
    adjustments: LogitAdjustments = NO_ADJUSTMENTS
    stop_strings: tuple[str, ...] = ()  # the token that completes one of these is the last
    turn_start: int = -1  # position in `tokens` from which on they were generated too; -1: none
    wants_raw_logprobs: bool = (
        False  # also return log-probabilities at temperature 1 without filtering
    )
    adapter: str = ""  # name of a loaded adapter; empty: the base alone

    @property
    def output_start(self) -> int:
        """Position at which the generated turn begins."""
        return len(self.tokens) if self.turn_start < 0 else self.turn_start

    @property
    def stop_start(self) -> int:
        """Position from which on a stop token, or a whole stop string, ends the turn."""
        return self.output_start + self.adjustments.min_tokens


@dataclass(slots=True)
class EngineOutput:
    """New tokens of n requests, in order of `ids`: request i owns the next `counts[i]` entries."""

    ids: NDArray[np.int64]
    counts: NDArray[np.int32]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]  # under the sampled distribution
    # at temperature 1; NaN where not requested, empty if never requested
    raw_logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]  # the weights that sampled each token
    finish_reasons: NDArray[np.int8]
    # [tokens, sparse layers x k]: experts of the position that predicted each token;
    # `meshrl.common.base.expert_routing` defines the values for none.
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
    """Computed tokens of a session.

    Another engine of the same model decides by them if it can use the keys and values of `tokens`.
    """

    tokens: NDArray[np.int32]  # [n], all computed tokens
    layout: str  # backend, dtype, order, shape; only engines of equal layout can use the cache
    version: int  # version of the weights that computed the n tokens; MIXED: several
    first_sampled_index: int  # position of the first of `tokens` that an engine sampled; n: none
    first_version: int  # version of the weights that sampled that token
    adapter: str = ""  # adapter of the cache; `version` then refers to the adapter


class SteppableEngine(Protocol):
    """Steps of an engine and their output, at its own speed or at an emulated one."""

    @property
    def backend(self) -> str:
        """Name of the backend, for display."""

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks that share the weights of one engine."""

    @property
    def busy_s(self) -> float:
        """Seconds spent in steps that computed something."""

    @property
    def has_finished(self) -> bool:
        """True if a request has finished since the last drain."""

    @property
    def next_step_delay_s(self) -> float:
        """Seconds that may pass before the next step has output; 0: step at once."""

    @property
    def prefill_tokens_per_s(self) -> float:
        """Known tokens computed per second, as measured recently; 0: not yet."""

    def step(self) -> bool:
        """Compute a token or a few of each running request.

        Return False if the engine is paused, asleep or quarantined, or has no work.
        """

    def drain_outputs(self, finished_only: bool = False) -> EngineOutput | None:
        """Return the output since the last drain, each token once; of finished requests only, or
        all.
        """


class TokenEngine(SteppableEngine, Protocol):
    """Contract of an engine. One thread drives it: `step` until it returns False.

    `drain_outputs` may be called at any time.
    """

    @property
    def num_preempted(self) -> int:
        """Number of preemptions so far."""

    @property
    def version(self) -> int:
        """Version of the loaded weights, of the base if adapters are loaded; NO_VERSION:
        incomplete.
        """

    @property
    def adapter_versions(self) -> Mapping[str, int]:
        """Versions of the loaded adapters, by name."""

    @property
    def num_running(self) -> int:
        """Number of requests that are being generated."""

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a slot."""

    @property
    def tokens_generated(self) -> int:
        """Tokens sampled so far."""

    @property
    def tokens_computed(self) -> int:
        """Tokens that went through the model, given or sampled, without cached ones."""

    @property
    def num_steps(self) -> int:
        """Steps of the batch so far."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Submit all requests or none (Refused, naming one); ignore an id that is in work."""

    def abort(self, ids: Iterable[int]) -> None:
        """End these requests with ABORTED; their generated tokens are still flushed."""

    def release_sessions(self, sessions: Iterable[int]) -> None:
        """Free the slots of ended sessions."""

    def update_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        """Load new weights, which take effect from the next step on.

        Raise Refused, without a change, if they do not fit. Raise Quarantined if they did not
        arrive completely: `version` is NO_VERSION then, `step` does nothing, `score` raises
        Refused, and running requests wait until an update or wake-up succeeds.
        """

    def load_adapter(
        self, name: str, tensors: Mapping[str, Tensor], scale: float, version: int
    ) -> None:
        """Load an adapter, or a new version of one, beside the base.

        Its factors A and B come by name (`meshrl.common.model.network.lora`) and act as scale * B
        A. It stays loaded over `update_weights`, `sleep` and `wake`. Running requests continue with
        the new version from the next step on or, on some servers, with the one that they began
        with: their tokens carry the version that sampled them. Raise Refused if it does not fit the
        model, or no more fit.
        """

    def quarantine(self) -> None:
        """Mark the engine as having no complete version, as after a Quarantined update.

        Call this if one of several dependent changes fails.
        """

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter; raise Refused while requests use it. An unknown name is no error."""

    def pause(self) -> None:
        """Make `step` do nothing until `resume`."""

    def resume(self) -> None:
        """Let `step` run again after `pause`."""

    def sleep(self) -> None:
        """Free the memory of weights and cache; running requests wait and lose no token."""

    def wake(self, state: Mapping[str, Tensor], version: int) -> None:
        """Load weights of any version and continue."""

    def score(self, tokens: IntArray, adapter: str = "") -> NDArray[np.float32]:
        """Return the log-probability, at temperature 1, of each token after the first: length n -
        1.
        """

    @property
    def cache_tokens(self) -> int:
        """Tokens that the cache holds; 0: unknown, or before the first weights."""

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values; 0: they cannot be moved."""

    @property
    def cannot_copy_memory(self) -> bool:
        """True if the content of freed memory cannot be copied, only built again."""

    @property
    def keeps_weights(self) -> bool:
        """True if the weights have their content again when their memory is allocated again."""

    @property
    def cache_size_bytes(self) -> int:
        """Bytes of the cache's memory; 0: unknown, or before the first weights."""

    def collect_weights(self) -> ReleasableMemory:
        """Return the memory of the weights; no step may run while it is freed."""

    def collect_cache(self) -> ReleasableMemory:
        """Return the memory of the cache; no step may run while it is freed."""

    def forget_cache(self) -> None:
        """Let running requests compute the cache again, because its content is lost."""

    @property
    def running_cache_tokens(self) -> int:
        """Tokens of running requests whose keys and values are cached."""

    @property
    def min_slice_s(self) -> float:
        """Seconds of a time slice below which `end_slice` costs too much of it."""

    def end_slice(self) -> None:
        """Stop computing until the next step."""

    def describe_session_cache(self, session: int) -> SessionCache | None:
        """Describe the computed tokens of an idle session.

        None if another engine could use none.
        """

    def copy_session_cache(self, session: int, start: int, end: int) -> NDArray[np.uint8] | None:
        """Copy the keys and values of tokens [start, end) of an idle session, in its layout.

        `start` begins a chunk. Return None if the engine no longer has them.
        """

    def expect_load(self, session: int, load: PrefixLoad) -> None:
        """Expect `load` for the session's next request, or for the one that is being prefilled.

        A call of `offer_load`, or the end of `load`, follows.
        """

    def offer_load(self, session: int, cache: SessionCache, load: PrefixLoad) -> bool:
        """Load the session's next request, or the one being prefilled, from `load` where that is
        faster.

        `load.is_front_first` is true if some of the cache is of other weights. Return False, with
        the load cancelled, if it must not or cannot be used here.
        """


class WithoutCacheTransfer:
    """Part of the contract for an engine whose keys and values are inaccessible."""

    cannot_copy_memory = True
    keeps_weights = False
    running_cache_tokens = 0
    min_slice_s = 0.0

    @property
    def cache_size_bytes(self) -> int:
        """Return 0: unknown."""
        return 0

    def forget_cache(self) -> None:
        """Do nothing, because the engine's own memory knows its content."""

    def end_slice(self) -> None:
        """Do nothing, because only `step` computes."""

    def collect_weights(self) -> ReleasableMemory:
        """Refuse, because the memory cannot be freed by kind."""
        raise Refused("this engine frees its memory only as a whole", where="engine")

    def collect_cache(self) -> ReleasableMemory:
        """Refuse, because the memory cannot be freed by kind."""
        return self.collect_weights()

    def describe_session_cache(self, session: int) -> SessionCache | None:
        """Return None."""
        return None

    def copy_session_cache(self, session: int, start: int, end: int) -> NDArray[np.uint8] | None:
        """Return None."""
        return None

    def expect_load(self, session: int, load: PrefixLoad) -> None:
        """Cancel the load, which cannot be used."""
        load.is_cancelled = True

    def offer_load(self, session: int, cache: SessionCache, load: PrefixLoad) -> bool:
        """Cancel the load and return False."""
        load.is_cancelled = True
        return False


def combine_outputs(pieces: Sequence[RequestOutput]) -> EngineOutput | None:
    """Combine pieces into one flush, in order; return None if there are none."""
    if not pieces:
        return None
    has_raw_logprobs = any(p.raw_logprobs is not None for p in pieces)
    return EngineOutput(
        ids=np.array([p.id for p in pieces], np.int64),
        counts=np.array([len(p.tokens) for p in pieces], np.int32),
        tokens=np.concatenate([p.tokens for p in pieces], dtype=np.int32, casting="same_kind"),
        logprobs=np.concatenate([p.logprobs for p in pieces], dtype=np.float32),
        raw_logprobs=np.concatenate(
            [_fill_raw_logprobs(p) for p in pieces] if has_raw_logprobs else [NO_FLOATS]
        ),
        versions=np.concatenate([p.versions for p in pieces], dtype=np.int32, casting="same_kind"),
        finish_reasons=np.array([p.finish_reason for p in pieces], np.int8),
        experts=concatenate_experts(
            [(NO_EXPERTS if p.experts is None else p.experts, len(p.tokens)) for p in pieces]
        ),
    )


def concatenate_outputs(first: EngineOutput, second: EngineOutput) -> EngineOutput:
    """Concatenate two flushes."""
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
    """Return the part of a flush that belongs to the masked requests."""
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
    """Raise Refused, with the reason, if no engine with these adapters could serve the request.

    `absent_ids`: ranges of ids that the tokenizer lacks, as in `ModelConfig`.
    """
    tokens = request.tokens
    reason = ""
    if tokens.ndim != 1 or len(tokens) == 0:
        reason = f"it needs at least one token in one dimension, not shape {tokens.shape}"
    elif int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        reason = f"its tokens are not all in [0, {vocab_size})"
    elif any(((first <= tokens) & (tokens < end)).any() for first, end in absent_ids):
        reason = "the tokenizer has no token for one of its ids"
    elif not request.temperature >= 0:
        reason = f"temperature {request.temperature} is not a number >= 0"
    elif not 0 < request.top_p <= 1:
        reason = f"top_p {request.top_p} is not in (0, 1]"
    elif not 0 <= request.min_p <= 1:
        reason = f"min_p {request.min_p} is not in [0, 1]"
    elif request.top_k < 0:
        reason = f"top_k {request.top_k} is negative"
    elif "" in request.stop_strings:
        reason = "an empty stop text would stop it before the first token"
    else:
        reason = _find_invalid_adjustment(request.adjustments, vocab_size, absent_ids)
    if request.adapter and request.adapter not in adapters:
        raise Refused(
            f"request {request.id} cannot be served: adapter {request.adapter!r} is not loaded",
            where="engine",
            fix="Load it first, or set no adapter for the base model",
        )
    if reason:
        raise Refused(
            f"request {request.id} cannot be served: {reason}",
            where="engine",
            fix="Check the tokenizer against the model's vocabulary, and the sampling settings",
        )


def _find_invalid_adjustment(
    adjustments: LogitAdjustments, vocab_size: int, absent_ids: Sequence[tuple[int, int]]
) -> str:
    """Return why no engine can apply the adjustments; empty if they are valid."""
    for token, bias in adjustments.logit_bias:
        if not 0 <= token < vocab_size or any(a <= token < end for a, end in absent_ids):
            return f"logit_bias has the id {token}, for which there is no token"
        if not math.isfinite(bias):
            return f"logit_bias has {bias} for the id {token}"
    if not 0 < adjustments.repetition_penalty < math.inf:
        return f"repetition_penalty {adjustments.repetition_penalty} is not a number above 0"
    if not math.isfinite(adjustments.presence_penalty):
        return f"presence_penalty is {adjustments.presence_penalty}"
    return "" if adjustments.min_tokens >= 0 else f"min_tokens {adjustments.min_tokens} is negative"


def adapter_in_use_error(adapter: str) -> Refused:
    """Create the error for an adapter that requests in work use."""
    return Refused(f"adapter {adapter!r} is in use", where="engine", fix="Abort its requests first")


def sequence_too_long_error(tokens: int, max_tokens: int) -> Refused:
    """Create the error for a sequence that is longer than a slot."""
    return Refused(
        f"{tokens} tokens exceed a slot of {max_tokens}",
        where="engine",
        fix="Raise rollout.max_tokens",
    )


def no_weights_error() -> Refused:
    """Create the error of an engine that has no complete version, or sleeps."""
    return Refused("the engine has no weights", where="engine", fix="Wake the engine first")
