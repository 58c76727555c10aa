"""Keys of a job file, with their defaults and meanings."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from meshrl.common.base.errors import ConfigError
from meshrl.common.base.files.remote_directory import is_url
from meshrl.common.base.type_hints import resolve_hints
from meshrl.common.job import builtin
from meshrl.common.job.cache_memory import CacheMemory, parse_cache_memory
from meshrl.common.job.constraints import (
    AlgorithmName,
    CacheMemoryValue,
    ConfigTable,
    Dtype,
    EndpointText,
    EngineBackend,
    FigureName,
    FilePath,
    Fraction,
    Integer,
    JobName,
    NonEmptyText,
    NonNegativeInteger,
    NonNegativeNumber,
    OptionsTable,
    PositiveInteger,
    PositiveNumber,
)
from meshrl.common.job.ranges import Ge, Interval, Le, MinLen
from meshrl.common.job.renamed_keys import RENAMED_JOB_KEYS, replace_old_keys


@dataclass(frozen=True)
class MeshConfig(ConfigTable):
    """`[mesh]`: number of workers, and listening addresses of processes."""

    # accelerators (or CPU slots) for the planner's roles
    workers: PositiveInteger = 3
    device: Literal["cpu", "cuda"] = "cpu"  # device type of the workers
    bind: EndpointText = "tcp://127.0.0.1:*"  # listening address of every process
    advertise: str = ""  # address for other processes; empty: the bound address
    metrics: str = "127.0.0.1:*"  # address of each process's metrics and health; off: none


@dataclass(frozen=True)
class TrainedModelConfig(ConfigTable):
    """`[model]`: trained model."""

    # a Hugging Face directory (config.json, safetensors) or a Hub id; empty: start from scratch
    path: FilePath = ""
    revision: str = ""  # branch, tag or commit of a Hub model; empty: main
    # keys of config.json for a model from scratch
    config: OptionsTable = field(default_factory=dict)
    tokenizer: FilePath = ""  # a tokenizer.json with its companion files; empty: the one in `path`

    @property
    def tokenizer_file(self) -> Path:
        """Path of the tokenizer.json."""
        return Path(self.tokenizer or Path(self.path) / "tokenizer.json")


INITIAL = "initial"  # path of a frozen model that has the initial weights of the training


@dataclass(frozen=True)
class FrozenModelConfig(ConfigTable):
    """`[models.<role>]`: frozen model."""

    # a Hugging Face directory or a Hub id; initial: the job's initial weights; empty: no such model
    path: FilePath = ""
    revision: str = ""  # branch, tag or commit of a Hub model; empty: main
    engine: Literal["torch"] = "torch"
    backend: EngineBackend = "auto"  # backend of the built-in engine, as rollout.backend
    dtype: Dtype = "float32"  # type of its weights and cache
    max_tokens: NonNegativeInteger = 0  # longest sequence; 0: rollout.max_tokens


@dataclass(frozen=True)
class ModelsConfig(ConfigTable):
    """`[models]`: frozen models by role."""

    reference: FrozenModelConfig = field(default_factory=FrozenModelConfig)  # of the KL term
    teacher: FrozenModelConfig = field(default_factory=FrozenModelConfig)  # for distillation
    reward: FrozenModelConfig = field(default_factory=FrozenModelConfig)  # for the judge

    @property
    def models_by_role(self) -> dict[str, FrozenModelConfig]:
        """Frozen models of the job, by role."""
        every = {"reference": self.reference, "teacher": self.teacher, "reward": self.reward}
        return {role: model for role, model in every.items() if model.path}


@dataclass(frozen=True)
class MixedDataset(ConfigTable):
    """`[[dataset.mix]]`: source of training rows, with its share of the prompts."""

    path: Annotated[FilePath, MinLen(1)]  # as dataset.train
    weight: PositiveNumber = 1.0  # its share is this, divided by the sum of all weights
    config: str = ""  # the following four: as in [dataset]
    revision: str = ""
    split: NonEmptyText = "train"
    columns: dict[str, NonEmptyText] = field(default_factory=dict)
    prompt: str = ""  # key of the prompt in its rows; empty: dataset.prompt


@dataclass(frozen=True)
class DatasetConfig(ConfigTable):
    """`[dataset]`: rows for training and evaluation."""

    train: FilePath = ""  # JSONL, JSON, CSV, Parquet, a `datasets` directory, or a Hub id
    mix: list[MixedDataset] = field(default_factory=list)  # sources of rows, instead of `train`
    held_out: FilePath = ""  # the same formats, never trained on
    config: str = ""  # configuration of a dataset that has several; empty: its default
    revision: str = ""  # branch, tag or commit of Hub datasets; empty: main
    # splits of a dataset that has several
    train_split: NonEmptyText = "train"
    held_out_split: NonEmptyText = "test"
    # row key -> existing key, which may be dotted: further keys of each row
    columns: dict[str, NonEmptyText] = field(default_factory=dict)
    # key of the prompt in a row; keys of inner tables are dotted, as in extra.question
    prompt: NonEmptyText = "prompt"
    response: NonEmptyText = "response"  # key of the target response for sft
    # system prompt before each prompt that is a text, in a chat
    system: str = ""
    # each epoch has its own order of the training rows, by `seed`; false: that of the file
    shuffle: bool = True
    # passes over the training rows, which limit budget.steps; 0: as many as the steps need
    epochs: NonNegativeInteger = 0
    # evaluation rows with a prompt that is also trained: reject the job, or report them
    overlap: Literal["reject", "report"] = "reject"
    # assistant messages that sft learns, of rows with `messages` instead of a response
    train_on: Literal["all", "last"] = "all"
    # training tasks of a verifiers taskset if `train` is empty; 0: all
    tasks: NonNegativeInteger = 0
    held_out_tasks: NonNegativeInteger = 0  # first tasks of a verifiers taskset, never trained on

    @property
    def trained_paths(self) -> list[str]:
        """Paths of the training rows; none: the tasks of a taskset."""
        return [source.path for source in self.mix] or ([self.train] if self.train else [])


@dataclass(frozen=True)
class EnvironmentConfig(ConfigTable):
    """`[environment]`: environment of trajectories, and their tools."""

    use: str = ""  # module:function, a factory; empty: single turn, with tools in a chat
    # chat format by its name in `renderers`; template: the tokenizer's own chat template; auto: the
    # format for the model's published name, or else its template; empty: plain text
    chat: str = ""
    chat_options: OptionsTable = field(default_factory=dict)  # for example enable_thinking
    # if the template renders earlier turns differently, for example without their reasoning: keep
    # the sampled tokens, or refuse to continue, which fails the trajectory
    chat_history: Literal["keep", "refuse"] = "keep"
    chat_date: str = (
        ""  # current date for a template, as 2026-11-22; empty: the date of the submission
    )
    # parser of tool calls with a template; auto: by the template's text
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "none"] = "auto"
    # texts in which special tokens are encoded. template: only in the chat template's, so that no
    # prompt, tool value or answer can begin or end a turn. anywhere: in all texts. Empty: like
    # template, but without a chat, prompts with special tokens are rejected.
    special_tokens: Literal["", "template", "anywhere"] = ""
    verifiers: str = ""  # id of a taskset of the `verifiers` package as the environment
    verifiers_options: OptionsTable = field(default_factory=dict)  # its `[env]` table
    python: FilePath = ""  # interpreter with `verifiers`
    processes: PositiveInteger = 1  # environment processes per rollout shard
    # concurrent operations per environment process, in threads; raise it for code that waits on I/O
    threads: Annotated[PositiveInteger, Le(1024)] = 1
    # tool name -> module:function, a built-in tool's name, or mcp:SERVER/TOOL
    tools: dict[str, str] = field(default_factory=dict)
    mcp: dict[str, list[str]] = field(default_factory=dict)  # MCP server name -> its command
    no_retry_tools: list[str] = field(default_factory=list)  # tools whose calls must not be retried
    tool_deadline_s: PositiveNumber = 5.0
    step_deadline_s: PositiveNumber = 30.0


@dataclass(frozen=True)
class JudgeConfig(ConfigTable):
    """`[reward.judge]`: model whose verdict is the reward."""

    use: str = ""  # "model": [models.reward]; or the base URL of an OpenAI-compatible server
    template: str = ""  # question with {prompt} and {answer}, or a file with it
    yes: NonEmptyText = "yes"  # answer for a correct response
    no: NonEmptyText = "no"  # answer for a wrong response
    model: str = ""  # model name at the server
    key: str = ""  # environment variable with the server's key; empty: none needed
    max_tokens: PositiveInteger = 512  # limit of the server's answer
    in_flight: PositiveInteger = 16  # concurrent requests of a shard to the server
    deadline_s: PositiveNumber = 60.0  # for one verdict
    retry_timeout_s: NonNegativeNumber = 600.0  # for a verdict with retries


@dataclass(frozen=True)
class RewardPartConfig(ConfigTable):
    """`[[reward.parts]]`: term of a reward that is a weighted sum."""

    use: NonEmptyText  # module:function, or a built-in reward's name
    weight: float = 1.0
    options: OptionsTable = field(default_factory=dict)  # a built-in reward's options


@dataclass(frozen=True)
class RewardConfig(ConfigTable):
    """`[reward]`: reward of finished trajectories."""

    use: str = ""  # module:function, or math | code_tests | regex | exact | choice
    options: OptionsTable = field(default_factory=dict)  # a built-in reward's options
    parts: list[RewardPartConfig] = field(default_factory=list)  # a weighted sum, instead of `use`
    over_group: bool = False  # `use` scores all trajectories of a group at once
    deadline_s: PositiveNumber = 10.0
    judge: JudgeConfig = field(default_factory=JudgeConfig)

    @property
    def reward_parts(self) -> list[RewardPartConfig]:
        """Terms of the reward; none: the environment's score, or a judge's verdict."""
        if self.parts or not self.use:
            return self.parts
        return [RewardPartConfig(self.use, 1.0, self.options)]


@dataclass(frozen=True)
class SandboxConfig(ConfigTable):
    """`[sandbox]`: limits of the model's code."""

    tier: Literal["runner", "cgroup", "bwrap", "landlock"] = "bwrap"  # minimum isolation
    processes: PositiveInteger = 1  # of the job, if it has tools or rewards
    python: FilePath = (
        ""  # interpreter of the model's code; empty: MeshRL's, with the standard library
    )
    root: FilePath = ""  # directory or OCI bundle with its file system; empty: the host's /usr
    runner: list[str] = field(default_factory=list)  # command that starts a container for each call
    imports: list[str] = field(default_factory=list)  # modules that are imported in advance
    wall_s: Annotated[float, Ge(0.1)] = 10.0  # for one call, without the wait for a core
    cpu_s: Annotated[float, Ge(0.1)] = 10.0
    memory_mb: Annotated[int, Interval(ge=32, le=1 << 20)] = 512
    max_processes: Annotated[PositiveInteger, Le(4096)] = 32  # per call, threads included
    open_files: Annotated[int, Interval(ge=16, le=1024)] = 128
    scratch_mb: Annotated[PositiveInteger, Le(1 << 20)] = 64  # total size of a call's files
    files: Annotated[Integer, Ge(16)] = 4096  # maximum number of a call's files
    output_kb: PositiveInteger = 64  # maximum output of a call
    sessions: PositiveInteger = 32  # open sessions per sandbox process
    session_idle_s: Annotated[float, Ge(1)] = 600.0


@dataclass(frozen=True)
class BucketConfig(ConfigTable):
    """`[[rollout.buckets]]`: share of the engines for trajectories of a range of lengths."""

    max_tokens: PositiveInteger  # maximum tokens that its trajectories have yet to sample
    batch: PositiveInteger  # decode batch size of its engines
    engines: PositiveNumber = 1.0  # weight of its share of the rollout engines


@dataclass(frozen=True)
class KvConfig(ConfigTable):
    """`[rollout.kv]`: tiers for keys and values outside of the engines' caches."""

    # GiB of a host's memory for all engines of the job there; negative: 1, or 0 for SGLang
    memory: float = -1.0
    disk: NonNegativeNumber = 0.0  # GiB of its disk
    path: FilePath = ""  # directory on the disk; empty: below the host's run root
    peers: bool = True  # engines transfer the KV cache of a trajectory that moves


@dataclass(frozen=True)
class RolloutConfig(ConfigTable):
    """`[rollout]`: engines, shards, and sampling parameters."""

    engine: Literal["torch", "sglang"] = "torch"
    backend: EngineBackend = "auto"  # the built-in engine: native (C++), eager, graphs (GPU), auto
    dtype: Dtype = "float32"  # type of the engine's weights and cache
    # memory of the built-in engine's cache, at most enough for all slots: a share of what is free
    # beside the weights, a size such as "24 GiB", or auto
    kv_memory: CacheMemoryValue = "auto"
    kv_tokens: NonNegativeInteger = 0  # tokens of an engine's cache; 0: as memory allows
    # auto: engines on the core's workers generate at the start of a step only; off: all the time
    seeding: Literal["auto", "off"] = "auto"
    shards: PositiveInteger = 1
    slots: PositiveInteger = 64  # sequences in an engine's decode batch
    # maximum length of a trajectory, prompt and tool results included
    max_tokens: Annotated[Integer, Ge(2)] = 320
    max_turns: PositiveInteger = 26
    temperature: PositiveNumber = 1.0
    # nucleus sampling: retained probability mass; 1: all
    top_p: Annotated[float, Interval(gt=0, le=1)] = 1.0
    top_k: NonNegativeInteger = 0  # number of most likely tokens retained; 0: all
    min_p: Fraction = 0.0  # minimum probability relative to the most likely token; 0: all
    # divisor of the logits of tokens that prompt or turn contain (CTRL); 1: none
    repetition_penalty: Annotated[float, Interval(gt=0, le=2)] = 1.0
    # number subtracted from the logits of tokens that the turn contains
    presence_penalty: Annotated[float, Interval(ge=-2, le=2)] = 0.0
    min_tokens: NonNegativeInteger = 0  # tokens of a turn before a stop can end it
    # token's text, or id:N -> number added to its logit
    logit_bias: dict[str, Annotated[float, Interval(ge=-100, le=100)]] = field(default_factory=dict)
    # tokens that end a turn, in addition to the model's own
    stop: list[str] = field(default_factory=list)
    stop_text: list[NonEmptyText] = field(default_factory=list)  # texts that end a turn
    kv_on_update: Literal["keep", "recompute"] = "keep"  # KV cache at a new version
    kv: KvConfig = field(default_factory=KvConfig)
    # interpreter with SGLang; empty: the one of `meshrl engine install sglang`
    sglang_python: FilePath = ""
    sglang_options: list[str] = field(default_factory=list)  # further flags of its server
    # transport of versions to its server; auto: by the devices of both sides
    sglang_weights: Literal["auto", "disk", "tensors", "ipc", "distributed"] = "auto"
    # transport of versions to hosts; auto: pull until a broadcast is measured to be faster
    weights: Literal["auto", "pull", "collective"] = "auto"
    broadcast: Literal["auto", "gloo", "nccl"] = "auto"  # auto: nccl if all members have a GPU
    # the built-in engine verifies its loaded weights against each version: for tests
    verify_weights: bool = False
    # by ascending length; empty: one bucket
    buckets: list[BucketConfig] = field(default_factory=list)
    emulate: str = ""  # accelerator whose speed the engine emulates; empty: none
    # tensor parallel degrees that the job's engines may have
    tensor_parallel: list[PositiveInteger] = field(default_factory=lambda: [1])
    # forced lengths in tokens, by trajectory; empty: not forced
    forced_lengths: list[PositiveInteger] = field(default_factory=list)

    @property
    def cache_memory(self) -> CacheMemory:
        """Memory of the built-in engine's cache."""
        return parse_cache_memory(self.kv_memory)

    @property
    def kv_tier_gib(self) -> float:
        """GiB of a host's memory for keys and values outside of caches."""
        return self.kv.memory if self.kv.memory >= 0 else float(self.engine != "sglang")


@dataclass(frozen=True)
class AlgorithmConfig(ConfigTable):
    """`[algorithm]`: algorithm that learns from groups of trajectories."""

    name: AlgorithmName = "grpo"
    group_size: PositiveInteger = 16
    groups_per_step: PositiveInteger = 16
    min_group: Annotated[Integer, Ge(-1)] = -1  # minimum scored members; -1: group_size - 2
    max_staleness: NonNegativeInteger = 2  # versions
    clip_low: float = -1.0  # ratios below 1 - this are clipped; negative: the algorithm's own
    clip_high: float = -1.0  # ratios above 1 + this are clipped; negative: the algorithm's own
    dual_clip: float = -1.0  # bound on ratios of bad tokens; 0: none, negative: the algorithm's own
    filter_zero_variance: bool = True
    refill_filtered: bool = False  # replace a filtered group by another one
    aggregation: Literal["", "tokens", "sequences", "constant"] = ""  # empty: the algorithm's own
    # divisor of "constant", in tokens; 0: rollout.max_tokens
    loss_constant: NonNegativeInteger = 0
    # number of last tokens with a length penalty; negative: the algorithm's own
    overlong_buffer: Integer = -1
    overlong_penalty: NonNegativeNumber = 1.0  # penalty of a trajectory of maximum length
    mask_truncated: bool = False  # no loss for trajectories that were cut off at max_tokens
    entropy_coefficient: NonNegativeNumber = 0.0  # weight of the entropy bonus in the loss
    kl: Literal["k1", "k2", "k3"] = "k3"  # estimator of the divergence from the reference
    kl_coefficient: NonNegativeNumber = 0.0  # 0: no reference is needed
    kl_in: Literal["loss", "reward"] = "loss"
    correction: Literal["none", "decoupled", "tis", "mis"] = (
        "none"  # of importance weights for older policies' tokens
    )
    correction_level: Literal["token", "sequence"] = "token"
    correction_low: float = -1.0  # minimum weight retained by mis; negative: its own
    correction_high: float = -1.0  # maximum weight; negative: the correction's own
    updates: PositiveInteger = 1  # optimizer updates per step, each on its share of the groups
    discount: Fraction = 1.0  # weight of later rewards, per token; ppo and reinforce_pp
    # ppo: 0: one-step advantages, 1: those of complete trajectories
    gae_lambda: Fraction = 1.0
    # ppo: clip range of value changes in a step
    value_clip: NonNegativeNumber = 0.2
    value_coefficient: NonNegativeNumber = (
        0.5  # ppo: weight of the value loss relative to the policy loss
    )


@dataclass(frozen=True)
class LoraConfig(ConfigTable):
    """`[lora]`: low-rank adapters that are trained instead of the model."""

    rank: NonNegativeInteger = 0  # rank of the trained adapters; 0: the model itself is trained
    alpha: PositiveNumber = 32.0  # adapter outputs are scaled by alpha / rank
    targets: list[str] = field(default_factory=list)  # projections; empty: all that take adapters
    # Adapters in engines: merged into the model's tensors, or computed beside it; auto: the faster
    # one.
    engine_mode: Literal["auto", "merged", "beside"] = "auto"

    @property
    def scale(self) -> float:
        """Factor of the product of an adapter's matrices."""
        return self.alpha / self.rank if self.rank else 0.0


@dataclass(frozen=True)
class OptimizerConfig(ConfigTable):
    """`[optimizer]`: learning rates and their schedule."""

    muon_lr: NonNegativeNumber = 0.003  # matrices; 0: AdamW on everything
    adamw_lr: NonNegativeNumber = 0.001
    weight_decay: NonNegativeNumber = 0.0
    schedule: Literal["linear", "constant", "cosine"] = "linear"  # from the whole rate to final_lr
    warmup_steps: NonNegativeInteger = 5
    final_lr: Fraction = 0.1  # share of the learning rate at the last step, unless constant
    clip_norm: PositiveNumber = 1.0


@dataclass(frozen=True)
class ZebraConfig(ConfigTable):
    """`[training.zebra]`: split of the core into attention ranks and expert ranks."""

    # number of ranks with attention, gates, embeddings and head: the first ones of training.ranks.
    # The other ranks have only experts. 0: all ranks are alike.
    attention: NonNegativeInteger = 0
    micro_batches: PositiveInteger = 4  # bins of each attention rank in a round
    # experts on each attention rank: by MoE layer, or one number for all; empty: none
    hosted: list[NonNegativeInteger] = field(default_factory=list)
    # the planner chooses all three, if this is faster on two kinds of accelerators than uniform
    # ranks
    auto: bool = False


@dataclass(frozen=True)
class TrainingConfig(ConfigTable):
    """`[training]`: computation of gradients, and checkpoints."""

    bin_tokens: PositiveInteger = 2560  # token budget of a bin, the unit of training work
    dtype: Dtype = "float32"  # dtype of passes; trained parameters stay float32
    activation_checkpointing: bool = False  # recompute layers in the backward pass
    checkpoint_every: PositiveInteger = 8  # steps; later steps are replayed from their records
    keep_checkpoints: PositiveInteger = 3
    deterministic: bool = False  # rounds wait for the complete batch, so that runs can be compared
    emulate: str = ""  # accelerator whose speed training emulates; empty: none
    # after this time the core recomputes a hybrid's bin
    bin_deadline_s: PositiveNumber = 20.0
    # successive rounds whose gradients one process sums; 0: as many as hide a hybrid's transfers
    block_rounds: NonNegativeInteger = 0
    # dtype to which each such sum is rounded, by the core and by hybrids
    gradient_dtype: Dtype = "float32"
    ranks: PositiveInteger = 1  # workers of the core: each holds its rows of the parameters
    # number of ranks over which the experts of a MoE layer are split; tokens are sent to them
    expert_parallel: PositiveInteger = 1
    zebra: ZebraConfig = field(default_factory=ZebraConfig)
    # timeout of a collective, after which a rank counts as lost
    rank_deadline_s: PositiveNumber = 120.0
    # versions are sent to other hosts as deltas; auto: while a host receives them
    deltas: Literal["auto", "off"] = "auto"
    # every n-th version stays a base of deltas, for hosts that fall behind; 0: none
    delta_anchors: NonNegativeInteger = 16


@dataclass(frozen=True)
class WeightsConfig(ConfigTable):
    """`[weights]`: retention of versions beside those that the run itself needs."""

    keep: PositiveInteger = 1  # number of newest versions; 1: the current one
    keep_every: NonNegativeInteger = 0  # every n-th version, without version 0; 0: none
    quota_gb: NonNegativeNumber = 0.0  # limit of the job's versions in the store, in GiB; 0: none
    # directory or URL for permanent versions, as Hugging Face directories; empty: none
    copies: FilePath = ""


@dataclass(frozen=True)
class WarmStartConfig(ConfigTable):
    """`[warm_start]`: supervised steps before the first version."""

    demonstrations: str = ""  # module:function; empty: no warm start
    steps: NonNegativeInteger = 420
    batch: PositiveInteger = 64  # demonstrations per step
    muon_lr: NonNegativeNumber = 0.02
    adamw_lr: NonNegativeNumber = 0.003
    warmup_steps: NonNegativeInteger = 20
    decay: Fraction = 0.4  # share of the steps, at the end, over which the learning rate falls to 0


@dataclass(frozen=True)
class EvaluationSampling(ConfigTable):
    """Samples of an evaluation set: those of the held-out set are in `[evaluation]` itself."""

    samples: PositiveInteger = 1  # samples per problem
    temperature: NonNegativeNumber = 1.0  # 0: greedy
    top_p: Fraction = 0.0  # retained probability mass; 0: rollout.top_p
    # maximum length of a trajectory, at most rollout.max_tokens; 0: that
    max_tokens: NonNegativeInteger = 0
    # each k of pass@k, at most `samples`
    pass_at: list[PositiveInteger] = field(default_factory=list)
    solved: float = 1.0  # minimum reward of a correct sample


@dataclass(frozen=True, kw_only=True)
class EvaluationDataset(EvaluationSampling):
    """`[[evaluation.datasets]]`: evaluation set beside the held-out one."""

    name: FigureName  # prefix of its figures' names
    path: Annotated[FilePath, MinLen(1)]  # rows as in dataset.held_out
    config: str = ""  # the following four: as in [dataset]
    revision: str = ""
    split: NonEmptyText = "test"
    columns: dict[str, NonEmptyText] = field(default_factory=dict)
    problems: PositiveInteger = 256  # number of first problems


@dataclass(frozen=True)
class EvaluationConfig(EvaluationSampling):
    """`[evaluation]`: evaluations and their schedule, and samples of the held-out set."""

    every: NonNegativeInteger = 10  # steps between evaluations; 0: only before and after
    before: bool = True
    after: bool = True
    problems: NonNegativeInteger = 256  # first problems of the held-out set
    datasets: list[EvaluationDataset] = field(default_factory=list)  # beside the held-out set
    best: str = (
        ""  # figure whose best version is retained, for example held_out.greedy; empty: none
    )
    # evaluations without a better version by `best` that end the job; 0: any number
    patience: NonNegativeInteger = 0
    max_wait_s: NonNegativeNumber = 900.0  # maximum wait of the next step for the last evaluation


@dataclass(frozen=True)
class BudgetConfig(ConfigTable):
    """`[budget]`: number of steps of the job."""

    # optimizer steps; 0: only the first version is evaluated
    steps: NonNegativeInteger = 48


@dataclass(frozen=True)
class TrackingConfig(ConfigTable):
    """`[tracking]`: trackers for the run's figures beside its own records."""

    tensorboard: bool | str = False  # true: files in RUN/tensorboard; or a directory
    wandb: str = ""  # project; empty: none
    trackio: str = ""  # project; empty: none
    trace: Fraction = 0.25  # share of groups whose trajectories `meshrl trace` shows; 0: none


@dataclass(frozen=True)
class PlannerConfig(ConfigTable):
    """`[planner]`: conditions for moves of gangs between rollout and training."""

    moves: bool = True  # true: the planner moves gangs; false: the default split stays
    interval_s: PositiveNumber = 1.0  # between two polls of the stage times
    every: PositiveInteger = 10  # steps after which the split is always planned again
    # conditions to plan the split at once: ratio of the two stage times,
    imbalance: Annotated[float, Ge(1)] = 1.15
    queue_pressure: PositiveNumber = 0.75  # waiting trajectories relative to all slots,
    active_pressure: PositiveNumber = 0.85  # trajectories at engines relative to all slots,
    rejected: PositiveInteger = 8  # number of stale trajectories
    gain: NonNegativeNumber = 0.05  # minimum saving of a move, as a share of a step's time
    window_steps: Annotated[Integer, Ge(2)] = 4  # measured steps before and after a move
    warmup_steps: NonNegativeInteger = 1
    cooldown_steps: NonNegativeInteger = 3
    min_rollout: PositiveInteger = 1
    training: PositiveInteger = 1  # training gangs in the default split; the others roll out


@dataclass(frozen=True)
class PoolWorkersConfig(ConfigTable):
    """`pool.workers`: bounds of the job's workers, all of its roles together."""

    least: NonNegativeInteger = (
        0  # minimum; the job waits until it gets these; 0: the computed minimum
    )
    most: NonNegativeInteger = 0  # maximum; 0: unlimited
    most_spot: NonNegativeInteger = 0  # maximum of spot workers; 0: unlimited
    most_lent: NonNegativeInteger = 0  # maximum of lent workers; 0: unlimited


@dataclass(frozen=True)
class PoolConfig(ConfigTable):
    """`[pool]`: the job's share of the workers among the jobs of its mesh."""

    priority: Integer = 0  # jobs of higher priority take workers from those of lower priority
    share: PositiveNumber = 1.0  # weight among jobs of the same priority
    workers: PoolWorkersConfig = field(default_factory=PoolWorkersConfig)
    # Engines on the workers of the core, by time slices: always, never, or where the planner
    # predicts a shorter step or workers are few.
    colocate: Literal["auto", "always", "never"] = "auto"
    # markets whose workers the job takes
    markets: Annotated[list[Literal["reserved", "spot", "lent"]], MinLen(1)] = field(
        default_factory=lambda: ["reserved", "spot", "lent"]
    )
    max_cost_per_hour: NonNegativeNumber = 0.0  # of all its workers; 0: unlimited


@dataclass(frozen=True)
class JobConfig(ConfigTable):
    """Complete job file, after validation."""

    name: JobName = "job"
    out: FilePath = ""  # run directory, or a URL for copies of its files; empty: runs/<name>
    seed: Integer = 0
    cache: FilePath = "~/.cache/meshrl"  # directory of cached warm starts; empty: none
    mesh: MeshConfig = field(default_factory=MeshConfig)
    model: TrainedModelConfig = field(default_factory=TrainedModelConfig)
    models: ModelsConfig = field(default_factory=ModelsConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)

    @property
    def out_url(self) -> str:
        """`out` if it is a URL, which gets copies of the run's files; the run directory has another
        name.
        """
        return self.out if is_url(self.out) else ""

    @property
    def out_directory(self) -> str:
        """`out` if it is the run directory."""
        return "" if is_url(self.out) else self.out

    @property
    def min_group(self) -> int:
        """Minimum scored members of a group; a group with fewer is dropped."""
        chosen, size = self.algorithm.min_group, self.algorithm.group_size
        return chosen if chosen >= 0 else max(min(2, size), size - 2)

    @property
    def jailed_names(self) -> list[str]:
        """Tools and rewards of the job that run code of the model."""
        rewards = [part.use for part in self.reward.reward_parts]
        return builtin.select_jailed([*self.environment.tools.values(), *rewards])

    @property
    def sandbox_count(self) -> int:
        """Number of sandbox processes of the job: 0 without tools and rewards."""
        needed = self.environment.tools or self.reward.reward_parts
        return self.sandbox.processes if needed else 0

    @property
    def has_reward(self) -> bool:
        """True if trajectories of the model can be scored."""
        environment = self.environment.use or self.environment.verifiers
        return bool(self.reward.reward_parts or self.reward.judge.use or environment)

    @property
    def is_supervised(self) -> bool:
        """True if the dataset supplies the trajectories and the model does not sample them."""
        return self.algorithm.name == "sft"

    def to_document(self) -> dict[str, Any]:
        """Return the job as plain data, for Redis and for `--dry-run`."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> JobConfig:
        """Return the job of a document from `to_document`; its values were validated at submission.

        Old names of renamed keys are accepted. ConfigError for an unknown key.
        """
        document = copy.deepcopy(document)
        replace_old_keys(document, RENAMED_JOB_KEYS)
        add_stored_defaults(document)
        built: JobConfig = _build_value(cls, document, "")
        return built


def add_stored_defaults(document: dict[str, Any]) -> None:
    """Add the keys that a stored document may lack, where its meaning is not today's default."""
    for table, values in STORED_DEFAULTS.items():
        document[table] = values | document.get(table, {})


# Values of keys that documents of earlier versions lack, if those differ from the default.
STORED_DEFAULTS: dict[str, dict[str, Any]] = {"dataset": {"shuffle": False}}


def _build_value(kind: Any, value: Any, key: str) -> Any:
    """Return a value of its type: tables become their dataclasses, also those in lists."""
    if get_origin(kind) is list:
        return [
            _build_value(get_args(kind)[0], item, f"{key}[{i}]") for i, item in enumerate(value)
        ]
    if not is_dataclass(kind):
        return value
    hints = resolve_hints(kind)
    places = {name: f"{key}.{name}" if key else name for name in value}
    if unknown := [place for name, place in places.items() if name not in hints]:
        raise ConfigError(f"unknown key {unknown[0]}")
    return kind(**{n: _build_value(hints[n], item, places[n]) for n, item in value.items()})  # type: ignore[operator]
