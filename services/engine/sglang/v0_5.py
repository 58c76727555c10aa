"""HTTP interface of SGLang 0.5: all names of its requests and answers.

The source is SGLang 0.5.23. Properties that the interface does not document:
- `stop_token_ids` take effect only without `ignore_eos`, so the served model names no end token.
- Aborts match a prefix of `rid`, so all rids of a server have one length.
- `output_token_logprobs` are of temperature 1 without filtering, because the server is started
  with SGLANG_RETURN_ORIGINAL_LOGPROB. Those of the sampled distribution come with the
  `sampling mask`, which requires a finite `top_k`.
- Its penalties count only tokens that it sampled for a request since the request last started to
  run, neither the prompt nor the output before a retraction or on another engine. `min_new_tokens`
  requires a tokenizer in the server. `logit_bias` depends on none of these; it changes
  `output_token_logprobs` too.
- A pause in place leaves the overlapped step in flight: its tokens are processed after the pause,
  and count for weights that were loaded in between. Loading does not wait for that step either.
- A stream's unsent tokens stay unsent in a pause and a retraction. An abort sends them. A token of
  the step of an abort may end the request, but the answer reports the abort only.
- A second abort of one `rid` has no effect, one of all requests has.
- Spans of weight versions come with a request's last chunk only.
- An ended request's keys and values stay in the cache, an aborted one's too.
- An aborted request that was waiting repeats its last token.
- Adapters come by `/load_lora_adapter_from_tensors`: `/load_lora_adapter` reads them as the model
  was read, and a server without weights reads none. They require an accelerator, or a torch that
  accepts ordinary memory as pinned.
- `/release_memory_occupation` releases and `/resume_memory_occupation` restores regions by tag.
  Graphs read what their capture left in their pool, and only some backends keep a host copy of it,
  so graphs stay resident. Before 0.5.23 the cache of sliding layers was in no region. A recurrent
  state is cleared at its next use only, and the flush of a release touches its pools.
- An update from disk or from tensors that fails at a tensor ends the server, which cannot undo
  it. A failed broadcast is answered, and the server is paused.
- `/weights_checker` returns a digest of each tensor in the server's layout: q, k and v as one,
  with zeros up to the next multiple of `VOCABULARY_ROWS` words and, on a CPU, of `INNER_ROWS` in
  an MLP. On a CPU it is the first eight bytes of a SHA-256. `/get_weights_by_name` supports few
  models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshrl.common.api.engine import NO_ADJUSTMENTS, FinishReason
from meshrl.common.base.errors import Refused, RemoteFailure
from meshrl.common.generation.engine_contract import GenerationRequest

ENVIRONMENT = {
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
    "TQDM_MININTERVAL": "2",  # seconds between two states of a progress bar in the log
    "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "0",  # graphs stay resident in sleep
    "SGLANG_TIMEOUT_KEEP_ALIVE": "60",  # seconds; longer than our client keeps a connection
}
SLEEP_TAGS = ("weights", "kv_cache")
SLIDING_RELEASE_VERSION = (0, 5, 23)  # first whose sliding layers release their cache
# Modules that log the progress of a start. The others have the level `warning`: with `info` SGLang
# logs all its arguments, with its key.
PROGRESS_LOGGERS = tuple(
    f"sglang.srt.{module}"
    for module in ("compilation", "distributed", "layers", "mem_cache", "model_executor")
)
MAX_MASK_TOKENS = 4096  # tokens that a sampling mask may name; SGLang's own default
FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORTED,
}

GENERATE, ABORT, INFO, READY = "/generate", "/abort_request", "/server_info", "/ready"
HEALTH = "/health_generate"
PAUSE, CONTINUE = "/pause_generation", "/continue_generation"
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
VERSION = "/update_weight_version"
BEGIN_UPDATE, END_UPDATE = "/begin_weight_update", "/end_weight_update"
FROM_DISK, FROM_TENSORS = "/update_weights_from_disk", "/update_weights_from_tensor"
FROM_GROUP = "/update_weights_from_distributed"
LOAD_ADAPTER, UNLOAD_ADAPTER = "/load_lora_adapter_from_tensors", "/unload_lora_adapter"
WEIGHTS_CHECKER = "/weights_checker"
VOCABULARY_ROWS, INNER_ROWS = 64, 32
JOIN_GROUP, LEAVE_GROUP = "/init_weights_update_group", "/destroy_weights_update_group"

ABORT_ALL = {"rid": "", "abort_all": True}  # body; no other client has requests here

# path -> fields of its body that are used
REQUIRED_FIELDS: dict[str, tuple[str, ...]] = {
    GENERATE: (
        "input_ids",
        "sampling_params",
        "return_logprob",
        "logprob_start_len",
        "return_sampling_mask",
        "sampling_logprobs_mode",
        "stream",
        "rid",
        "extra_key",
    ),
    ABORT: ("rid", "abort_all"),
    INFO: (),
    HEALTH: (),
    PAUSE: ("mode",),
    CONTINUE: ("torch_empty_cache",),
    RELEASE: ("tags",),
    RESUME: ("tags",),
    VERSION: ("new_version", "abort_all_requests"),
}
ADAPTER_FIELDS: dict[str, tuple[str, ...]] = {
    GENERATE: ("lora_path",),
    LOAD_ADAPTER: ("lora_name", "config_dict", "serialized_named_tensors"),
    UNLOAD_ADAPTER: ("lora_name",),
}
READBACK_FIELDS: dict[str, tuple[str, ...]] = {WEIGHTS_CHECKER: ()}  # its body is optional
UPDATE_SESSION_FIELDS = {BEGIN_UPDATE: (), END_UPDATE: ()}
BUCKET_FIELDS = ("serialized_named_tensors", "load_format", "flush_cache")
TRANSPORT_FIELDS: dict[str, dict[str, tuple[str, ...]]] = {
    "disk": {FROM_DISK: ("model_path", "load_format", "flush_cache", "weight_version")},
    "tensors": {**UPDATE_SESSION_FIELDS, FROM_TENSORS: BUCKET_FIELDS},
    "ipc": {**UPDATE_SESSION_FIELDS, FROM_TENSORS: BUCKET_FIELDS},
    "distributed": {
        **UPDATE_SESSION_FIELDS,
        FROM_GROUP: ("names", "dtypes", "shapes", "group_name", "flush_cache"),
        JOIN_GROUP: ("master_address", "master_port", "rank_offset", "world_size", "backend"),
        LEAVE_GROUP: ("group_name",),
    },
}


def find_missing(openapi: Mapping[str, Any], required: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the operations of `required` that a server's description does not list."""
    lacking = []
    for path, names in required.items():
        operations = openapi["paths"].get(path)
        if operations is None:
            lacking.append(path)
            continue
        found: set[str] = set()
        for operation in operations.values():
            content = operation.get("requestBody", {}).get("content", {})
            reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
            schema = openapi["components"]["schemas"].get(reference.rsplit("/", 1)[-1], {})
            found |= schema.get("properties", {}).keys()
        known = found
        lacking += [f"{path}: {name}" for name in names if name not in known]
    return lacking


def build_logging_config() -> dict[str, Any]:
    """Build the logging configuration that SGLang's processes read from a file."""
    form = {"format": "[%(asctime)s] %(message)s", "datefmt": "%Y-%m-%d %H:%M:%S"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": form},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "plain"}},
        "root": {"level": "WARNING", "handlers": ["stderr"]},
        "loggers": {name: {"level": "INFO"} for name in PROGRESS_LOGGERS},
    }


def parse_version(version: str) -> tuple[int, ...]:
    """Parse the leading numbers of a version, as (0, 5, 23)."""
    parts = (part for part in version.split(".")[:3] if part.isdigit())
    return tuple(int(part) for part in parts)


def choose_sleep_tags(about: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the tags by which a described server's memory is released and restored unharmed.

    Empty: it cannot be, and the server must be restarted.
    """
    if about.get("uses_mamba_radix_cache"):
        return ()
    states = about.get("internal_states") or [{}]
    memory = states[0].get("memory_usage", {})
    has_sliding_cache = memory.get("token_capacity_swa") is not None
    if has_sliding_cache and parse_version(str(about.get("version", ""))) < SLIDING_RELEASE_VERSION:
        return ()
    return SLEEP_TAGS


def keeps_released_weights(about: Mapping[str, Any]) -> bool:
    """Return True if a described server copies weights to host memory before it releases them.

    Weights that other processes share are not copied.
    """
    is_shared = about.get("weight_cache_mode", "off") != "off"
    return bool(about.get("enable_weights_cpu_backup")) and not is_shared


def parse_memory_bytes(about: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of a described server's memory by tag, which it reports in GiB."""
    states = about.get("internal_states") or [{}]
    memory = states[0].get("memory_usage", {})
    names = {"weights": "weight", "kv_cache": "kvcache"}
    return {tag: int(float(memory.get(name) or 0.0) * 2**30) for tag, name in names.items()}


def is_plain_sampling(request: GenerationRequest) -> bool:
    """Return True for greedy sampling or for sampling from the model's unmodified distribution."""
    is_unfiltered = request.top_p >= 1 and request.top_k == 0 and request.min_p == 0
    return request.temperature == 0 or (request.temperature == 1 and is_unfiltered)


def check_sampling(request: GenerationRequest, vocab_size: int, uses_seeds: bool) -> None:
    """Raise Refused if SGLang cannot return the probabilities of the sampled distribution."""
    adjustments = request.adjustments
    if replace(adjustments, logit_bias=()) != NO_ADJUSTMENTS or (
        adjustments.logit_bias and request.wants_raw_logprobs
    ):
        raise Refused(
            f"request {request.id} has a penalty, min_tokens, or a logit_bias with raw "
            "log-probabilities, which SGLang applies differently or not at all",
            where="engine",
            fix="Use the built-in engine, or only logit_bias",
        )
    if is_plain_sampling(request):
        return
    if (request.top_k or vocab_size) > MAX_MASK_TOKENS:
        raise Refused(
            f"request {request.id} samples from more than {MAX_MASK_TOKENS} tokens, not at "
            "temperature 1; SGLang reports no more probabilities",
            where="engine",
            fix=(
                f"Set rollout.top_k to {MAX_MASK_TOKENS} or less, or use temperature 1 without "
                "top_p and min_p"
            ),
        )
    if request.min_p > 0 and uses_seeds:
        raise Refused(
            f"request {request.id} has min_p, which SGLang does not support with seeds",
            where="engine",
            fix="Remove min_p or --enable-deterministic-inference",
        )


def build_generate_body(
    request: GenerationRequest,
    max_new_tokens: int,
    rid: str,
    cache_key: str,
    vocab_size: int,
    adapter: str = "",
    *,
    generated: Sequence[int] = (),
    stream_interval: int = 1,
) -> dict[str, Any]:
    """Build the body of a streamed request for at most `max_new_tokens` tokens.

    `cache_key` names whose keys and values it may reuse; `adapter` is the server's name of the
    adapter. `generated` are tokens that the request has already, `stream_interval` the tokens of an
    event.
    """
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": [*request.tokens.tolist(), *generated],
        "stream": True,
        "return_logprob": True,
        "extra_key": cache_key,
        "sampling_params": {
            "max_new_tokens": max_new_tokens,
            "temperature": request.temperature,
            "stop_token_ids": list(request.stop_ids),
            "top_p": request.top_p,
            "top_k": request.top_k or -1,
            "min_p": request.min_p,
            "stream_interval": stream_interval,
            "sampling_seed": request.seed & (2**63 - 1),  # used by servers that sample from seeds
        },
    }
    if bias := request.adjustments.logit_bias:
        body["sampling_params"]["logit_bias"] = {str(token): number for token, number in bias}
    if adapter:
        body["lora_path"] = adapter
    if not is_plain_sampling(request):
        body["return_sampling_mask"] = True
        body["sampling_logprobs_mode"] = "selected"
        body["sampling_params"]["top_k"] = request.top_k or vocab_size
    return body


@dataclass(slots=True)
class StreamChunk:
    """New tokens of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # under the sampled distribution
    raw_logprobs: list[float] = field(default_factory=list)  # at temperature 1
    spans: list[tuple[int, int, int]] = field(default_factory=list)  # (version, start, end)
    computed_tokens: int = 0  # tokens of prompt and answer that were not found in the cache
    cached_tokens: int = 0  # tokens of the prompt that were
    retractions: int = 0  # how often its cache was dropped
    finish: FinishReason = FinishReason.RUNNING
    reason: str = ""  # reason of an abort, if SGLang reports one


def parse_chunk(
    event: Mapping[str, Any], received_tokens: int, plain_sampling: bool
) -> StreamChunk:
    """Parse one event of a stream of which `received_tokens` tokens have arrived.

    Raise RemoteFailure if it lacks the probabilities of the sampled distribution; those of
    temperature 1 are the same only if `plain_sampling`.
    """
    if "error" in event:
        return StreamChunk(
            finish=FinishReason.ABORTED, reason=str(event["error"].get("message", event["error"]))
        )
    meta = event["meta_info"]
    new = max(0, int(meta["completion_tokens"]) - received_tokens)
    pairs = meta.get("output_token_logprobs", [])[-new:] if new else []
    tokens = [int(pair[1]) for pair in pairs]
    unmodified = [float(pair[0]) for pair in pairs]
    sampled = meta.get("output_token_sampling_logprobs", [])[-new:] if new else []
    if not plain_sampling and len(sampled) != len(tokens):
        raise RemoteFailure(
            f"{GENERATE} returned the probabilities of {len(sampled)} of {len(tokens)} tokens "
            "that were not sampled at temperature 1 from the whole vocabulary",
            fix="Install the version of `meshrl engine install sglang`",
        )
    finish = meta["finish_reason"]
    return StreamChunk(
        tokens=tokens,
        logprobs=unmodified if plain_sampling else [float(x) for x in sampled],
        raw_logprobs=unmodified,
        spans=[(int(s["version"]), s["start"], s["end"]) for s in meta.get("weight_versions", ())],
        computed_tokens=meta.get("prompt_tokens", 0) - meta.get("cached_tokens", 0)
        if received_tokens == 0
        else 0,
        cached_tokens=meta.get("cached_tokens", 0) if received_tokens == 0 else 0,
        retractions=meta.get("num_retractions", 0),
        finish=FINISH_REASONS[finish["type"]] if finish else FinishReason.RUNNING,
        reason=str(finish.get("message", "")) if finish else "",
    )


def build_score_body(tokens: Sequence[int], rid: str, adapter: str = "") -> dict[str, Any]:
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": list(tokens),
        "return_logprob": True,
        "logprob_start_len": 0,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
    }
    return body | ({"lora_path": adapter} if adapter else {})


def parse_scores(answer: Mapping[str, Any]) -> NDArray[np.float32]:
    """Parse the log-probability of each token after the first.

    Tokens are matched by position, since the id of the vocabulary's last token comes back as 0.
    """
    pairs = answer["meta_info"]["input_token_logprobs"]
    return np.array([pair[0] for pair in pairs[1:]], np.float32)
