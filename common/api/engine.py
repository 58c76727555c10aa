"""The interface of an engine process: shards send requests, and tokens stream back to them."""

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
    """How a request stands, or ended."""

    RUNNING = 0
    STOP = 1  # at a stop token, which is included, or a stop text
    LENGTH = 2  # at its last token
    ABORTED = 3  # by the shard or the engine, with all tokens so far delivered
    REJECTED = 4  # the engine did not take it: of the shard's own account, never in a flush


@message
class AttachStream:
    """A shard asks for the stream of its requests' tokens; an earlier stream of the same owner
    ends.
    """

    owner: str  # a rollout shard's name
    incarnation: str


@message
class TokenBatch:
    """What a flush brings: for request `ids[i]`, its next `counts[i]` entries of the token arrays.

    `finish[i]` is a `FinishReason`.
    """

    request_ids: Array  # int64 [n]
    token_counts: Array  # int32 [n]
    tokens: Array  # int32 [sum of counts]
    logprobs: Array  # float32, of the sampling distribution
    raw_logprobs: Array  # float32, at temperature 1 with nothing left out; empty: nobody asked
    token_versions: Array  # int32, of the weights that sampled the token
    finish_reasons: Array  # int8 [n]
    loaded_version: int  # the weights now loaded; a flush without requests tells of new ones
    # int16 [tokens, sparse layers x k]: where a mixture of experts sent the place that predicted
    # each; see meshrl.common.base.expert_routing.
    expert_ids: Array = field(default_factory=lambda: NO_EXPERTS)
    loaded_lineage: int = 0  # the lineage of `version`


@message
class SamplingParams:
    """How the requests of a batch sample, beside temperature, and where they stop."""

    stop_token_ids: list[int]  # tokens
    stop_strings: list[str]
    top_p: float = 1.0  # share of the probability that is kept, likeliest first; 1: all
    top_k: int = 0  # likeliest tokens that are kept; 0: all
    min_p: float = 0.0  # kept: at least so likely as this times the likeliest; 0: all
    wants_raw_logprobs: bool = False  # log-probabilities of the model itself are wanted too
    adapter: str = ""  # beside the base, by its name; empty: what the engine has for its job


@message
class SubmitRequests:
    """A batch of requests; `tokens` is their contexts one after the other, cut by `lengths`."""

    owner: str
    incarnation: str
    request_ids: Array  # int64 [n], unique within the owner's incarnation
    sessions: (
        Array  # int64 [n], the trajectory: its next request finds the keys and values of this one
    )
    lengths: Array  # int32 [n]
    tokens: Array  # int32
    turn_starts: Array  # int32 [n], where the turn begins: the context from there on was generated
    max_new_tokens: Array  # int32 [n]
    temperature: Array  # float32 [n], 0: greedy
    seeds: Array  # int64 [n]
    sampling: SamplingParams
    ended_sessions: Array  # int64, sessions whose slots are free


@message
class AbortRequests:
    """Ends requests of an owner; what they had generated still comes in a flush, as ABORTED."""

    owner: str
    request_ids: Array  # int64


@message
class CacheMove:
    """Asks an engine to take over what `source` has computed of a session, between two of its
    turns.
    """

    owner: str  # a shard that is attached, and will say when the session has ended
    session: int
    source: str  # an engine's name; it keeps its copy until the session is among its `ended`


@message
class CacheMoveResult:
    """The answer to CacheMove, when nothing more comes: how much came, and what that took."""

    tokens: int  # that came in time to be used
    size_bytes: int  # size of the keys and values that came
    duration_s: float  # duration, without waiting for other moves to this engine
    is_complete: bool  # whether all came that was wanted; if not, the turn computes the rest
    first_byte_s: float = 0.0  # until the first of it came; 0: nothing did


@message
class ExportCache:
    """Asks an engine for a copy of what it has computed of an idle session. What the very weights
    have computed that the asker has comes from its end, else from its beginning.
    """

    session: int
    manifest: str  # the manifest of what is loaded there


@message
class CacheHeader:
    """What there is of a session; see `SessionCache`."""

    tokens: Array  # int32, all that is computed
    layout: str
    version: int
    first_sampled: int
    first_version: int
    manifest: str  # the manifest of what is loaded at the source
    adapter: str = ""  # with which they computed


@message
class CacheFrame:
    """One item of the stream that answers Export: the head alone, then the next bytes of chunks,
    each `size` bytes of tokens [start, end).
    """

    header: CacheHeader | None
    start: int
    end: int
    size_bytes: int
    content: Array  # uint8


@message
class ChunkLookup:
    """Asks which chunks of keys and values lie on a host's shelves."""

    domain: str
    chunk_names: Array  # uint8 [n x 16]


@message
class ChunkLookupResult:
    """The answer to Stored: which of them do; they stay for a while."""

    found: Array  # bool [n]


class Engine(RoleControl):
    """The methods of an engine process."""

    attach = Stream(AttachStream, TokenBatch, idle_s=math.inf)  # idle while nothing is asked for
    submit = Call(SubmitRequests, NoneType, deadline_s=15.0)
    abort = Cast(AbortRequests)
    move_cache = Call(CacheMove, CacheMoveResult, deadline_s=75.0)
    export_cache = Stream(ExportCache, CacheFrame, idle_s=5.0, credits=16)
    look_up_chunks = Call(ChunkLookup, ChunkLookupResult, deadline_s=5.0, idempotent=True)
    notify_change = Cast(ChangeHint)
