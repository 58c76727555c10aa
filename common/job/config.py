"""The keys of a job file, with their defaults and meanings."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Interval, Le, MinLen

from meshrl.common.base.errors import ConfigError
from meshrl.common.base.files.remote_directory import is_url
from meshrl.common.base.type_hints import resolve_hints
from meshrl.common.job import builtin
from meshrl.common.job.constraints import (
    AlgorithmName,
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


@dataclass(frozen=True)
class MeshConfig(ConfigTable):
    """`[mesh]`: how many workers there are, and where processes listen."""

    # accelerators (CPU slots here) that the planner may place roles on
    workers: Annotated[Integer, Ge(2)] = 3
    device: Literal["cpu", "cuda"] = "cpu"  # what workers compute on
    bind: EndpointText = "tcp://127.0.0.1:*"  # where every process listens
    advertise: str = ""  # what it tells others; empty: the bound address
    metrics: str = "127.0.0.1:*"  # where each process serves its metrics and health; off


@dataclass(frozen=True)
class TrainedModelConfig(ConfigTable):
    """`[model]`: the model that is trained."""

    # a Hugging Face directory (config.json, safetensors); empty: start from scratch
    path: FilePath = ""
    config: OptionsTable = field(default_factory=dict)  # config.json's keys, used from scratch
    tokenizer: FilePath = ""  # a tokenizer.json, beside its companions; empty: the one in `path`

    @property
    def tokenizer_file(self) -> Path:
        """The tokenizer.json."""
        return Path(self.tokenizer or Path(self.path) / "tokenizer.json")


INITIAL = "initial"  # as the path of a frozen model: the weights that training begins from


@dataclass(frozen=True)
class FrozenModelConfig(ConfigTable):
    """`[models.<role>]`: a model that is used and not trained."""

    # a Hugging Face directory; initial: the job's first weights; empty: no such one
    path: FilePath = ""
    engine: Literal["torch"] = "torch"
    engine_path: EngineBackend = "auto"  # the built-in engine's path, as rollout.path
    dtype: Dtype = "float32"  # type of its weights and cache
    max_tokens: NonNegativeInteger = 0  # longest sequence; 0: rollout.max_tokens


@dataclass(frozen=True)
class ModelsConfig(ConfigTable):
    """`[models]`: the frozen models by role."""

    reference: FrozenModelConfig = field(default_factory=FrozenModelConfig)  # for the KL term
    teacher: FrozenModelConfig = field(default_factory=FrozenModelConfig)  # the model to distil
    reward: FrozenModelConfig = field(default_factory=FrozenModelConfig)  # the model that judges

    @property
    def models_by_role(self) -> dict[str, FrozenModelConfig]:
        """The frozen models that the job has, by role."""
        every = {"reference": self.reference, "teacher": self.teacher, "reward": self.reward}
        return {role: model for role, model in every.items() if model.path}


@dataclass(frozen=True)
class DatasetConfig(ConfigTable):
    """`[dataset]`: the rows that are trained and evaluated on."""

    train: FilePath = ""  # JSONL, Parquet or a `datasets` directory
    held_out: FilePath = ""  # the same, never trained on
    prompt: NonEmptyText = "prompt"  # the row's key that holds the prompt
    response: NonEmptyText = "response"  # the row's key that holds what sft learns to answer
    tasks: NonNegativeInteger = (
        0  # tasks of a verifiers taskset to train on if `train` is empty; 0: all
    )
    held_out_tasks: NonNegativeInteger = 0  # first tasks of a verifiers taskset, never trained on


@dataclass(frozen=True)
class EnvironmentConfig(ConfigTable):
    """`[environment]`: what a trajectory is, and the tools that it may call."""

    use: str = ""  # module:function, a factory; empty: single turn, and tools in a chat
    # chat format, as `renderers` calls it; template: the tokenizer's own chat template; auto: the
    # format of the model's published name, or else its template; empty: plain text
    chat: str = ""
    chat_options: OptionsTable = field(default_factory=dict)  # such as enable_thinking
    # where the template would write earlier turns otherwise, as without their reasoning: keep what
    # was sampled, or refuse to go on, which fails the trajectory
    chat_history: Literal["keep", "refuse"] = "keep"
    chat_date: str = ""  # the day that it is to a template, as 2026-11-22; empty: the submission's
    # how tool calls are read where a template is used; auto: by what its text teaches
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "none"] = "auto"
    # whose texts special tokens are made of: the chat template's alone, so that none in a prompt, a
    # tool's value or an answer begins or ends a turn, or all texts; empty: as template, but without
    # a chat prompts that hold some are refused
    special_tokens: Literal["", "template", "anywhere"] = ""
    verifiers: str = ""  # id of a taskset of the `verifiers` package, which is the environment
    verifiers_options: OptionsTable = field(default_factory=dict)  # its `[env]` table
    python: FilePath = ""  # the interpreter that has `verifiers`
    processes: PositiveInteger = 1  # environment processes of a rollout shard
    # operations that one of them runs at a time, in threads: more where its code waits for others
    threads: Annotated[PositiveInteger, Le(1024)] = 1
    # tool name -> module:function, a built-in one's name, or mcp:SERVER/TOOL
    tools: dict[str, str] = field(default_factory=dict)
    mcp: dict[str, list[str]] = field(default_factory=dict)  # MCP server name -> its command
    once: list[str] = field(default_factory=list)  # tools that must not run a second time
    tool_deadline_s: PositiveNumber = 5.0
    step_deadline_s: PositiveNumber = 30.0


@dataclass(frozen=True)
class JudgeConfig(ConfigTable):
    """`[reward.judge]`: a model whose verdict is the reward."""

    use: str = ""  # model: [models.reward]; or the base URL of an OpenAI-compatible server
    template: str = ""  # what it is asked, with {prompt} and {answer}; or a file that says it
    yes: NonEmptyText = "yes"  # what it answers to what is right
    no: NonEmptyText = "no"  # what it answers to what is wrong
    model: str = ""  # its name at the server
    key: str = ""  # environment variable that holds the server's key; empty: it needs none
    max_tokens: PositiveInteger = 512  # most that the server may answer with
    in_flight: PositiveInteger = 16  # requests of a shard at the server at a time
    deadline_s: PositiveNumber = 60.0  # for one verdict
    patience_s: NonNegativeNumber = 600.0  # for a verdict that has to be asked for again


@dataclass(frozen=True)
class RewardPartConfig(ConfigTable):
    """`[[reward.parts]]`: one term of a reward that is a weighted sum."""

    use: NonEmptyText  # module:function, or a built-in reward's name
    weight: float = 1.0
    options: OptionsTable = field(default_factory=dict)  # a built-in reward's options


@dataclass(frozen=True)
class RewardConfig(ConfigTable):
    """`[reward]`: how finished trajectories are scored."""

    use: str = ""  # module:function, or math | code_tests | regex | exact | choice
    options: OptionsTable = field(default_factory=dict)  # a built-in reward's options
    parts: list[RewardPartConfig] = field(default_factory=list)  # a weighted sum, in place of `use`
    deadline_s: PositiveNumber = 10.0
    judge: JudgeConfig = field(default_factory=JudgeConfig)

    @property
    def reward_parts(self) -> list[RewardPartConfig]:
        """What the reward is the sum of; nothing: the environment's score, or a judge's verdict."""
        if self.parts or not self.use:
            return self.parts
        return [RewardPartConfig(self.use, 1.0, self.options)]


@dataclass(frozen=True)
class SandboxConfig(ConfigTable):
    """`[sandbox]`: the limits of code that the model wrote."""

    tier: Literal["runner", "cgroup", "bwrap", "landlock"] = "bwrap"  # the least isolation
    processes: PositiveInteger = 1  # sandbox processes of the job, if it has tools or rewards
    python: FilePath = ""  # interpreter of the model's code; empty: ours, with the standard library
    root: FilePath = ""  # directory or OCI bundle that is its file system; empty: the host's /usr
    runner: list[str] = field(default_factory=list)  # starts a container for each call
    imports: list[str] = field(default_factory=list)  # modules that it finds imported already
    wall_s: Annotated[float, Ge(0.1)] = 10.0  # for one call, less what it waited for a core
    cpu_s: Annotated[float, Ge(0.1)] = 10.0
    memory_mb: Annotated[int, Interval(ge=32, le=1 << 20)] = 512
    max_processes: Annotated[PositiveInteger, Le(4096)] = 32  # for one call, threads included
    open_files: Annotated[int, Interval(ge=16, le=1024)] = 128
    scratch_mb: Annotated[PositiveInteger, Le(1 << 20)] = (
        64  # size of the files that a call may write
    )
    files: Annotated[Integer, Ge(16)] = 4096  # files that a call may make
    output_kb: PositiveInteger = 64  # output that a call may print
    sessions: PositiveInteger = 32  # open at a time in one sandbox process
    session_idle_s: Annotated[float, Ge(1)] = 600.0


@dataclass(frozen=True)
class BucketConfig(ConfigTable):
    """`[[rollout.buckets]]`: a share of the engines, for trajectories of a range of lengths."""

    max_tokens: PositiveInteger  # still to be sampled by the trajectories that it is for
    batch: PositiveInteger  # requests that one of its engines decodes together
    engines: PositiveNumber = 1.0  # share of the rollout engines, beside the other buckets' shares


@dataclass(frozen=True)
class KvConfig(ConfigTable):
    """`[rollout.kv]`: keys and values that engines keep outside of their caches."""

    # GiB of a host's memory for all engines of the job there; negative: 1, and none for SGLang
    memory: float = -1.0
    disk: NonNegativeNumber = 0.0  # GiB of its disk
    path: FilePath = ""  # where on the disk; empty: below the host's run root
    peers: bool = True  # engines send each other what a trajectory needs that has moved


@dataclass(frozen=True)
class RolloutConfig(ConfigTable):
    """`[rollout]`: engines, shards, and how the model samples."""

    engine: Literal["torch", "sglang"] = "torch"
    path: EngineBackend = "auto"  # the built-in engine: native (C++), eager, graphs (GPU), auto
    dtype: Dtype = "float32"  # type of the engine's weights and cache
    kv_tokens: NonNegativeInteger = 0  # tokens that the engine's cache holds; 0: all slots full
    shards: PositiveInteger = 1
    slots: PositiveInteger = 64  # sequences that an engine decodes together
    # longest trajectory, prompt and tool results included
    max_tokens: Annotated[Integer, Ge(2)] = 320
    max_turns: PositiveInteger = 26
    temperature: PositiveNumber = 1.0
    # share of the probability that is kept, likeliest first; 1: all
    top_p: Annotated[float, Interval(gt=0, le=1)] = 1.0
    top_k: NonNegativeInteger = 0  # likeliest tokens that are kept; 0: all
    min_p: Fraction = 0.0  # kept: at least so likely as this times the likeliest; 0: all
    stop: list[str] = field(default_factory=list)  # tokens that end a turn, beside the model's own
    stop_text: list[NonEmptyText] = field(default_factory=list)  # texts that end a turn
    kv_on_update: Literal["keep", "recompute"] = "keep"  # the cache at a new version
    kv: KvConfig = field(default_factory=KvConfig)
    sglang_python: FilePath = (
        ""  # interpreter that has SGLang; empty: `meshrl engine install sglang`'s
    )
    sglang_options: list[str] = field(default_factory=list)  # further flags of its server
    sglang_weights: Literal["auto", "disk", "tensors", "distributed"] = "auto"  # auto: disk
    # how hosts receive versions: auto is pull until a broadcast is measured to be faster
    weights: Literal["auto", "pull", "collective"] = "auto"
    broadcast: Literal["auto", "gloo", "nccl"] = "auto"  # auto: nccl where all members have a GPU
    # the built-in engine compares what it computes with against each version: for tests
    read_back: bool = False
    buckets: list[BucketConfig] = field(default_factory=list)  # short ones first; empty: one
    pace: str = ""  # an accelerator's, which the engine is slowed down to; empty: its own
    # workers that share the weights of one engine: degrees that engines of the job may have
    tensor_parallel: list[PositiveInteger] = field(default_factory=lambda: [1])
    # forced, in tokens, by trajectory; empty: no
    lengths: list[PositiveInteger] = field(default_factory=list)

    @property
    def kv_memory_gib(self) -> float:
        """GiB of a host's memory that keys and values may take outside of caches."""
        return self.kv.memory if self.kv.memory >= 0 else float(self.engine != "sglang")


@dataclass(frozen=True)
class AlgorithmConfig(ConfigTable):
    """`[algorithm]`: what is learned from groups of trajectories."""

    name: AlgorithmName = "grpo"
    group_size: PositiveInteger = 16
    groups_per_step: PositiveInteger = 16
    min_group: Annotated[Integer, Ge(-1)] = -1  # members that must be scored; -1: group_size - 2
    max_staleness: NonNegativeInteger = 2  # versions
    clip_low: float = -1.0  # ratios below 1 - this are clipped; negative: the algorithm's own
    clip_high: float = -1.0  # ratios above 1 + this are clipped; negative: the algorithm's own
    dual_clip: float = -1.0  # bound on ratios of bad tokens; 0: none, negative: the algorithm's own
    filter_zero_variance: bool = True
    refill_filtered: bool = False  # a filtered group is replaced by another
    aggregation: Literal["", "tokens", "sequences", "constant"] = ""  # empty: the algorithm's own
    loss_constant: NonNegativeInteger = (
        0  # tokens that "constant" divides by; 0: rollout.max_tokens
    )
    overlong_buffer: Integer = (
        -1
    )  # last tokens, in which length costs; negative: the algorithm's own
    overlong_penalty: NonNegativeNumber = 1.0  # reward that a trajectory of full length loses
    mask_truncated: bool = False  # trajectories that were cut off at max_tokens carry no loss
    kl: Literal["k1", "k2", "k3"] = "k3"  # estimate of the divergence from the reference
    kl_coefficient: NonNegativeNumber = 0.0  # 0: no reference is needed
    kl_in: Literal["loss", "reward"] = "loss"
    correction: Literal["none", "decoupled", "tis", "mis"] = "none"  # for older policies' tokens
    correction_level: Literal["token", "sequence"] = "token"
    correction_low: float = -1.0  # lowest weight that mis keeps; negative: its own
    correction_high: float = -1.0  # largest weight; negative: the correction's own
    updates: PositiveInteger = 1  # optimizer updates in a step, each on its share of the groups
    discount: Fraction = 1.0  # weight of later rewards, per token; ppo and reinforce_pp
    gae_lambda: Fraction = (
        1.0  # ppo: from one-step advantages, 0, to those of whole trajectories, 1
    )
    # ppo: how far a value may move in a step without losing its gradient
    value_clip: NonNegativeNumber = 0.2
    value_coefficient: NonNegativeNumber = 0.5  # ppo: weight of the value loss beside the policy's


@dataclass(frozen=True)
class LoraConfig(ConfigTable):
    """`[lora]`: low-rank adapters that are trained in place of the model."""

    rank: NonNegativeInteger = 0  # rank of the trained adapters; 0: the model itself is trained
    alpha: PositiveNumber = 32.0  # what adapters add is multiplied by alpha / rank
    targets: list[str] = field(default_factory=list)  # projections; empty: all that take adapters
    # What engines do with adapters: add them to the model's tensors, or compute them beside it;
    # auto: what takes them less time.
    engines: Literal["auto", "merged", "beside"] = "auto"

    @property
    def scale(self) -> float:
        """What the product of an adapter's factors is multiplied by."""
        return self.alpha / self.rank if self.rank else 0.0


@dataclass(frozen=True)
class OptimizerConfig(ConfigTable):
    """`[optimizer]`: learning rates and their schedule."""

    muon_lr: NonNegativeNumber = 0.003  # matrices; 0: AdamW on everything
    adamw_lr: NonNegativeNumber = 0.001
    weight_decay: NonNegativeNumber = 0.0
    warmup_steps: NonNegativeInteger = 5
    final_lr: Fraction = 0.1  # share of the learning rate that is left at the last step
    clip_norm: PositiveNumber = 1.0


@dataclass(frozen=True)
class ZebraConfig(ConfigTable):
    """`[training.zebra]`: ranks with attention, and others with the experts of a mixture."""

    # ranks with attention, gates, embeddings and head, the first ones of training.ranks, of which
    # the others have experts alone; 0: all ranks are alike
    attention: NonNegativeInteger = 0
    micro_batches: PositiveInteger = 4  # bins of each of them in a round
    # experts that each of them has, too: by mixture layer, or one number for all; empty: none
    hosted: list[NonNegativeInteger] = field(default_factory=list)
    # the planner finds all three, where accelerators of two kinds are faster so than all alike
    auto: bool = False


@dataclass(frozen=True)
class TrainingConfig(ConfigTable):
    """`[training]`: how gradients are computed, and when checkpoints are written."""

    bin_tokens: PositiveInteger = 2560  # token budget of a bin, the unit of training work
    dtype: Dtype = "float32"  # type of passes; what is trained stays float32
    activation_checkpointing: bool = False  # layers are computed again on the way back
    checkpoint_every: PositiveInteger = 8  # steps; those since are repeated from their records
    keep_checkpoints: PositiveInteger = 3
    deterministic: bool = False  # rounds wait for the whole batch, so that runs can be compared
    pace: str = ""  # an accelerator's, which training is slowed down to; empty: its own
    # a hybrid's bin that is not back by then is recomputed by the core
    bin_deadline_s: PositiveNumber = 20.0
    ranks: PositiveInteger = 1  # workers that share the core: each holds its rows of the parameters
    # ranks over which the experts of a mixture's layer are split, so that tokens go to them
    expert_parallel: PositiveInteger = 1
    zebra: ZebraConfig = field(default_factory=ZebraConfig)
    # for the others in a collective; past it a rank counts as lost
    rank_deadline_s: PositiveNumber = 120.0
    # versions reach other hosts as what changed; auto: while one receives them
    deltas: Literal["auto", "off"] = "auto"
    # each so manieth version stays what deltas are from, for hosts that fall behind; 0: none
    delta_anchors: NonNegativeInteger = 16


@dataclass(frozen=True)
class WeightsConfig(ConfigTable):
    """`[weights]`: which versions stay in the store beside those that the run itself needs."""

    keep: PositiveInteger = 1  # the newest ones; 1: the current one
    keep_every: NonNegativeInteger = 0  # each one whose number this divides, but 0; 0: none
    quota_gb: NonNegativeNumber = 0.0  # GiB that the job's versions may have in the store; 0: any
    # directory or URL that gets those that stay for good, as Hugging Face directories; empty: none
    copies: FilePath = ""


@dataclass(frozen=True)
class WarmStartConfig(ConfigTable):
    """`[warm_start]`: supervised steps before the first version."""

    demonstrations: str = ""  # module:function; empty: no warm start
    steps: NonNegativeInteger = 420
    batch: PositiveInteger = 64  # demonstrations a step
    muon_lr: NonNegativeNumber = 0.02
    adamw_lr: NonNegativeNumber = 0.003
    warmup_steps: NonNegativeInteger = 20
    decay: Fraction = 0.4  # share of the steps, at the end, in which the learning rate falls to 0


@dataclass(frozen=True)
class EvaluationDataset(ConfigTable):
    """`[[evaluation.datasets]]`: a set to evaluate on beside the held-out one."""

    name: FigureName  # what its figures are called by
    path: Annotated[FilePath, MinLen(1)]  # rows as in dataset.held_out
    problems: PositiveInteger = 256  # its first ones
    samples: PositiveInteger = 1  # samples drawn of each problem
    temperature: NonNegativeNumber = 1.0  # 0: greedy
    pass_at: list[PositiveInteger] = field(
        default_factory=list
    )  # each k of pass@k, at most `samples`
    solved: float = 1.0  # reward from which a sample counts as right


@dataclass(frozen=True)
class EvaluationConfig(ConfigTable):
    """`[evaluation]`: what is evaluated, and when."""

    every: NonNegativeInteger = 10  # steps; 0: only before and after
    before: bool = True
    after: bool = True
    problems: NonNegativeInteger = 256  # first problems of the held-out set
    datasets: list[EvaluationDataset] = field(default_factory=list)  # beside the held-out set
    best: str = ""  # figure whose best version is kept, as held_out.greedy; empty: none
    hold_s: NonNegativeNumber = 900.0  # longest wait of the next step for the last one's evaluation


@dataclass(frozen=True)
class BudgetConfig(ConfigTable):
    """`[budget]`: when the job is done."""

    steps: NonNegativeInteger = (
        48  # optimizer steps; 0: the first version is evaluated, and that is all
    )


@dataclass(frozen=True)
class TrackingConfig(ConfigTable):
    """`[tracking]`: where the run's figures are shown beside its own records."""

    tensorboard: bool | str = False  # true: files in RUN/tensorboard; or in that directory
    wandb: str = ""  # project; empty: not there
    trackio: str = ""  # project; empty: not there
    trace: Fraction = 0.25  # of the groups whose trajectories `meshrl trace` shows; 0: no traces


@dataclass(frozen=True)
class PlannerConfig(ConfigTable):
    """`[planner]`: when a gang moves between rollout and training."""

    moves: bool = True  # whether the planner moves gangs; false: the default split is held
    interval_s: PositiveNumber = 1.0  # between two looks at the stage times
    every: PositiveInteger = 10  # steps after which the split is planned anew, whatever happens
    # ratio of the two stage times from which it is planned at once,
    imbalance: Annotated[float, Ge(1)] = 1.15
    queue_pressure: PositiveNumber = 0.75  # trajectories that wait for an engine, over all slots,
    active_pressure: PositiveNumber = 0.85  # trajectories at engines, over all slots,
    rejected: PositiveInteger = 8  # trajectories that came back too old
    gain: NonNegativeNumber = 0.05  # share of a step's time that a move must save
    window_steps: Annotated[Integer, Ge(2)] = 4  # that are measured before a move, and after it
    warmup_steps: NonNegativeInteger = 1
    cooldown_steps: NonNegativeInteger = 3
    min_rollout: PositiveInteger = 1
    training: PositiveInteger = 1  # gangs that train in the default split; the others roll out


@dataclass(frozen=True)
class PoolWorkersConfig(ConfigTable):
    """`pool.workers`: how many workers the job may have, all of its roles together."""

    least: NonNegativeInteger = 0  # it waits until it gets so many; 0: what it takes at least
    most: NonNegativeInteger = 0  # it gets no more; 0: as many as there are


@dataclass(frozen=True)
class PoolConfig(ConfigTable):
    """`[pool]`: the job's part beside the other jobs of its mesh."""

    priority: Integer = 0  # jobs of a higher one take workers from those of a lower one
    share: PositiveNumber = 1.0  # weight beside jobs of the same priority
    workers: PoolWorkersConfig = field(default_factory=PoolWorkersConfig)


@dataclass(frozen=True)
class JobConfig(ConfigTable):
    """A whole job file, checked."""

    name: JobName = "job"
    out: FilePath = ""  # run directory, or a URL that gets what lies there; empty: runs/<name>
    seed: Integer = 0
    cache: FilePath = "~/.cache/meshrl"  # warm starts; empty: none
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
        """`out` where it is a URL, which gets what the run makes; its directory has a name of its
        own then.
        """
        return self.out if is_url(self.out) else ""

    @property
    def out_directory(self) -> str:
        """`out` where it is the run directory."""
        return "" if is_url(self.out) else self.out

    @property
    def min_group(self) -> int:
        """Scored members below which a group is dropped."""
        chosen, size = self.algorithm.min_group, self.algorithm.group_size
        return chosen if chosen >= 0 else max(min(2, size), size - 2)

    @property
    def jailed_names(self) -> list[str]:
        """The job's tools and rewards that run code which the model wrote."""
        rewards = [part.use for part in self.reward.reward_parts]
        return builtin.select_jailed([*self.environment.tools.values(), *rewards])

    @property
    def sandbox_count(self) -> int:
        """Sandbox processes that the job has: none without tools and rewards."""
        needed = self.environment.tools or self.reward.reward_parts
        return self.sandbox.processes if needed else 0

    @property
    def is_supervised(self) -> bool:
        """Whether trajectories are given by the dataset instead of sampled."""
        return self.algorithm.name == "sft"

    def to_document(self) -> dict[str, Any]:
        """The job as plain data, for Redis and for `--dry-run`."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> JobConfig:
        """The inverse of `document`, whose values were checked when the job was submitted;
        ConfigError names a key that is unknown.
        """
        built: JobConfig = _build_value(cls, document, "")
        return built


def _build_value(kind: Any, value: Any, key: str) -> Any:
    """A value of its type: tables become their dataclasses, also those in lists."""
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
