"""Interface of an engine process: shards send requests, and tokens stream back to them."""

from __future__ import annotations

import math
from dataclasses import field
from enum import IntEnum
from types import NoneType

from meshrl.common.api.calls.interface import Call, Cast, ChangeHint, Stream
from meshrl.common.api.calls.role import RoleControl
from meshrl.common.base.encoding.messages import Array, message
from meshrl.common.base.expert_routing import NO_EXPERTS


class FinishReason(IntEnum):
    """State of a request, or the reason for its end."""

    RUNNING = 0
    STOP = 1  # at a stop token, which is included, or a stop text
    LENGTH = 2  # at its last token
    ABORTED = 3  # by the shard or the engine; all tokens so far are delivered
    REJECTED = 4  # by the engine; used inside the shard, never in a flush


@message
class AttachStream:
    """Request of a shard for the stream of its requests' tokens.

    An earlier stream of the same owner ends.
    """

    owner: str  # a rollout shard's name
    incarnation: str


@message
class TokenBatch:
    """Tokens of one flush: `token_counts[i]` entries of the token arrays for request
    `request_ids[i]`.

    `finish_reasons[i]` is a `FinishReason`.
    """

    request_ids: Array  # int64 [n]
    token_counts: Array  # int32 [n]
    tokens: Array  # int32 [sum of counts]
    logprobs: Array  # float32, of the sampling distribution
    raw_logprobs: Array  # float32, at temperature 1 over all tokens; empty: not requested
    token_versions: Array  # int32, of the weights that sampled the token
    finish_reasons: Array  # int8 [n]
    loaded_version: int  # loaded weights; a flush without requests reports new ones
    # int16 [tokens, sparse layers x k]: experts of the position that predicted each token; see
    # meshrl.common.base.expert_routing.
    expert_ids: Array = field(default_factory=lambda: NO_EXPERTS)
    loaded_lineage: int = 0  # lineage of `loaded_version`


@message
class LogitAdjustments:
    """Changes of the logits before temperature and filters, in the order of the fields.

    The output is that of the turn: it restarts with each turn of a trajectory.
    """

    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, number added to its logit)
    # logits of tokens in prompt and output are divided by it if positive, else multiplied; 1: none
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0  # subtracted from logits of tokens in the output; 0: none
    min_tokens: int = 0  # tokens of the output before a stop token or a stop text can end it

    @property
    def is_neutral(self) -> bool:
        """True if no logit changes."""
        return self == NO_ADJUSTMENTS


NO_ADJUSTMENTS = LogitAdjustments()


@message
class SamplingParams:
    """Sampling and stop parameters that all requests of a batch have in common."""

    stop_token_ids: list[int]
    stop_strings: list[str]
    top_k: int = 0  # likeliest tokens that are kept; 0: all
    min_p: float = 0.0  # kept: at least so likely as this times the likeliest; 0: all
    adjustments: LogitAdjustments = NO_ADJUSTMENTS
    wants_raw_logprobs: bool = False  # request `raw_logprobs` too
    adapter: str = ""  # name of the adapter beside the base; empty: the engine's own for its job


@message
class SubmitRequests:
    """Batch of requests; `tokens` is their contexts one after the other, split by `lengths`."""

    owner: str
    incarnation: str
    request_ids: Array  # int64 [n], unique within the owner's incarnation
    # int64 [n], of the trajectory: its next request reuses this one's keys and values
    sessions: Array
    lengths: Array  # int32 [n]
    tokens: Array  # int32
    turn_starts: Array  # int32 [n], start of the turn: the context from there on was generated
    max_new_tokens: Array  # int32 [n]
    temperature: Array  # float32 [n], 0: greedy
    top_p: Array  # float64 [n], share of the probability that is kept, likeliest first; 1: all
    seeds: Array  # int64 [n]
    sampling: SamplingParams
    ended_sessions: Array  # int64, sessions whose slots are free


@message
class AbortRequests:
    """Order to end requests of an owner; a flush delivers their tokens so far, as ABORTED."""

    owner: str
    request_ids: Array  # int64


@message
class CacheMove:
    """Request to fetch a session's KV cache from `source`, between two of the session's turns."""

    owner: str  # an attached shard, which will report the session's end
    session: int
    source: str  # an engine's name; it retains its copy until the session is in `ended_sessions`


@message
class CacheMoveResult:
    """Answer to CacheMove at the end of the transfer: its size and duration."""

    tokens: int  # that arrived in time to be used
    size_bytes: int  # of the transferred keys and values
    duration_s: float  # without the wait for other moves to this engine
    is_complete: bool  # False: the turn recomputes the rest
    first_byte_s: float = 0.0  # until the first byte arrived; 0: none did


@message
class ExportCache:
    """Request for a copy of the KV cache of an idle session.

    Tokens computed with the caller's own weights are sent from the end of the session, others from
    its beginning.
    """

    session: int
    manifest: str  # of the caller's loaded weights


@message
class CacheHeader:
    """Description of a session's KV cache; see `SessionCache`."""

    tokens: Array  # int32, all tokens in the cache
    layout: str
    version: int
    first_sampled: int
    first_version: int
    manifest: str  # of the source's loaded weights
    adapter: str = ""  # used for the computation


@message
class CacheFrame:
    """Item of the stream that answers ExportCache.

    The first item is the header alone. The others are the next bytes of chunks, each with
    `size_bytes` bytes of tokens [start, end).
    """

    header: CacheHeader | None
    start: int
    end: int
    size_bytes: int
    content: Array  # uint8


@message
class ChunkLookup:
    """Request for which chunks of keys and values are in a host's KV tiers."""

    domain: str
    chunk_names: Array  # uint8 [n x 16]


@message
class ChunkLookupResult:
    """Answer to ChunkLookup. The chunks that were found stay for a while."""

    found: Array  # bool [n]


class Engine(RoleControl):
    """Methods of an engine process."""

    attach = Stream(AttachStream, TokenBatch, idle_s=math.inf)  # idle without requests
    submit = Call(SubmitRequests, NoneType, deadline_s=15.0)
    abort = Cast(AbortRequests)
    move_cache = Call(CacheMove, CacheMoveResult, deadline_s=75.0)
    export_cache = Stream(ExportCache, CacheFrame, idle_s=5.0, credits=16)
    look_up_chunks = Call(ChunkLookup, ChunkLookupResult, deadline_s=5.0, idempotent=True)
    notify_change = Cast(ChangeHint)
