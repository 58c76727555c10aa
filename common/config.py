"""What a job is: every key of a job file, its default, and what it means."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Any, get_type_hints

from common import builtin
from common.errors import ConfigError


@dataclass(frozen=True)
class MeshConfig:
    workers: int = 3  # accelerators (CPU slots here) that the planner may place roles on
    device: str = "cpu"  # what workers compute on
    bind: str = "tcp://127.0.0.1:*"  # where every process listens
    advertise: str = ""  # what it tells others; empty: the bound address
    metrics: str = "127.0.0.1:*"  # where each process serves its metrics and health; off


@dataclass(frozen=True)
class ModelConfigSection:
    path: str = ""  # a Hugging Face directory (config.json, safetensors); empty: start from scratch
    config: dict[str, Any] = field(default_factory=dict)  # config.json's keys, used from scratch
    tokenizer: str = ""  # a tokenizer.json; empty: the one in `path`


INITIAL = "initial"  # as the path of a frozen model: the weights that training begins from


@dataclass(frozen=True)
class FrozenModelConfig:
    path: str = ""  # a Hugging Face directory; initial: the job's first weights; empty: no such one
    engine: str = "torch"
    engine_path: str = "auto"  # of the built-in engine, as rollout.path
    dtype: str = "float32"  # of its weights and cache: float32 | bfloat16
    max_tokens: int = 0  # of a sequence; 0: rollout.max_tokens


@dataclass(frozen=True)
class ModelsConfig:
    reference: FrozenModelConfig = field(default_factory=FrozenModelConfig)  # of the KL term
    teacher: FrozenModelConfig = field(default_factory=FrozenModelConfig)  # that is distilled
    reward: FrozenModelConfig = field(default_factory=FrozenModelConfig)  # that judges

    @property
    def declared(self) -> dict[str, FrozenModelConfig]:
        """The frozen models that the job has, by role."""
        every = {"reference": self.reference, "teacher": self.teacher, "reward": self.reward}
        return {role: model for role, model in every.items() if model.path}


@dataclass(frozen=True)
class DatasetConfig:
    train: str = ""  # JSONL, Parquet or a `datasets` directory
    held_out: str = ""  # the same, never trained on
    prompt: str = "prompt"  # the row's key that holds the prompt
    response: str = "response"  # the row's key that holds what sft learns to answer
    tasks: int = 0  # of a verifiers taskset, trained on when `train` names no file; 0: all
    held_out_tasks: int = 0  # of a verifiers taskset, its first ones


@dataclass(frozen=True)
class EnvironmentConfig:
    use: str = ""  # module:function, a factory; empty: single turn, and tools in a chat
    chat: str = ""  # chat format, as `renderers` calls it; auto: the model's; empty: plain text
    chat_options: dict[str, Any] = field(default_factory=dict)  # such as enable_thinking
    verifiers: str = ""  # id of a taskset of the `verifiers` package, which is the environment
    verifiers_options: dict[str, Any] = field(default_factory=dict)  # its `[env]` table
    python: str = ""  # the interpreter that has `verifiers`
    processes: int = 1  # environment processes of a rollout shard
    # tool name -> module:function, a built-in one's name, or mcp:SERVER/TOOL
    tools: dict[str, str] = field(default_factory=dict)
    mcp: dict[str, list[str]] = field(default_factory=dict)  # MCP server name -> its command
    once: list[str] = field(default_factory=list)  # tools that must not run a second time
    tool_deadline_s: float = 5.0
    step_deadline_s: float = 30.0


@dataclass(frozen=True)
class JudgeConfig:
    use: str = ""  # model: [models.reward]; or the base URL of an OpenAI-compatible server
    template: str = ""  # what it is asked, with {prompt} and {answer}; or a file that says it
    yes: str = "yes"  # what it answers to what is right
    no: str = "no"  # and to what is wrong
    model: str = ""  # its name at the server
    key: str = ""  # environment variable that holds the server's key; empty: it needs none
    max_tokens: int = 512  # that the server may answer with
    in_flight: int = 16  # requests of a shard at the server at a time
    deadline_s: float = 60.0  # for one verdict
    patience_s: float = 600.0  # for one that has to be asked for again


@dataclass(frozen=True)
class RewardPartConfig:
    use: str  # module:function, or a built-in reward's name
    weight: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)  # of a built-in one


@dataclass(frozen=True)
class RewardConfig:
    use: str = ""  # module:function, or math | code_tests | regex | exact | choice
    options: dict[str, Any] = field(default_factory=dict)  # of a built-in one
    parts: list[RewardPartConfig] = field(default_factory=list)  # a weighted sum, in place of `use`
    deadline_s: float = 10.0
    judge: JudgeConfig = field(default_factory=JudgeConfig)

    @property
    def declared(self) -> list[RewardPartConfig]:
        """What the reward is the sum of; nothing: the environment's score, or a judge's verdict."""
        if self.parts or not self.use:
            return self.parts
        return [RewardPartConfig(self.use, 1.0, self.options)]


@dataclass(frozen=True)
class SandboxConfig:
    tier: str = "bwrap"  # isolation that code of the model needs: cgroup | bwrap | landlock
    processes: int = 1  # sandbox processes of the mesh
    python: str = ""  # interpreter of the model's code; empty: ours, with the standard library
    imports: list[str] = field(default_factory=list)  # modules that it finds imported already
    wall_s: float = 10.0  # of one call, less what it waited for a core
    cpu_s: float = 10.0
    memory_mb: int = 512
    max_processes: int = 32  # of a call, threads included
    open_files: int = 128
    scratch_mb: int = 64  # of files that a call may write
    files: int = 4096  # that it may make
    output_kb: int = 64  # that it may print
    sessions: int = 32  # of a sandbox process at a time
    session_idle_s: float = 600.0


@dataclass(frozen=True)
class BucketConfig:
    max_tokens: int  # still to be sampled by the trajectories that it is for
    batch: int  # requests that one of its engines decodes together
    engines: float = 1.0  # share of the rollout engines, beside the other buckets' shares


@dataclass(frozen=True)
class RolloutConfig:
    engine: str = "torch"
    path: str = "auto"  # of the built-in engine: native (C++), eager, graphs (GPU), auto
    dtype: str = "float32"  # of the engine's weights and cache: float32 | bfloat16
    kv_tokens: int = 0  # tokens that the engine's cache holds; 0: all slots full
    shards: int = 1
    slots: int = 64  # sequences that an engine decodes together
    max_tokens: int = 320  # of a whole trajectory, prompt and tool results included
    max_turns: int = 26
    temperature: float = 1.0
    top_p: float = 1.0  # share of the probability that is kept, likeliest first; 1: all
    top_k: int = 0  # likeliest tokens that are kept; 0: all
    min_p: float = 0.0  # kept: at least so likely as this times the likeliest; 0: all
    stop: list[str] = field(default_factory=list)  # tokens that end a turn
    stop_text: list[str] = field(default_factory=list)  # texts that end a turn
    kv_on_update: str = "keep"  # keep | recompute
    sglang_python: str = ""  # interpreter that has SGLang; empty: `meshrl engine install sglang`'s
    sglang_options: list[str] = field(default_factory=list)  # further flags of its server
    sglang_weights: str = "auto"  # how they reach it: disk | tensors | distributed; auto: disk
    buckets: list[BucketConfig] = field(default_factory=list)  # short ones first; empty: one
    pace: str = ""  # an accelerator's, which the engine is slowed down to; empty: its own
    lengths: list[int] = field(default_factory=list)  # forced, in tokens, by trajectory; empty: no


@dataclass(frozen=True)
class AlgorithmConfig:
    name: str = "grpo"
    group_size: int = 16
    groups_per_step: int = 16
    min_group: int = -1  # members that must be scored; -1: group_size - 2
    max_staleness: int = 2  # versions
    clip_low: float = -1.0  # ratios below 1 - this are clipped; negative: the algorithm's own
    clip_high: float = -1.0  # ratios above 1 + this are clipped; negative: the algorithm's own
    dual_clip: float = -1.0  # bound on ratios of bad tokens; 0: none, negative: the algorithm's own
    filter_zero_variance: bool = True
    refill_filtered: bool = False  # a filtered group is replaced by another
    aggregation: str = ""  # tokens | sequences | constant; empty: the algorithm's own
    loss_constant: int = 0  # tokens that "constant" divides by; 0: rollout.max_tokens
    overlong_buffer: int = -1  # last tokens, in which length costs; negative: the algorithm's own
    overlong_penalty: float = 1.0  # reward that a trajectory of full length loses
    kl: str = "k3"  # estimate of the divergence from the reference: k1 | k2 | k3
    kl_coefficient: float = 0.0  # 0: no reference is needed
    kl_in: str = "loss"  # loss | reward
    correction: str = "none"  # of tokens from an older policy: none | decoupled | tis | mis
    correction_level: str = "token"  # token | sequence
    correction_low: float = -1.0  # lowest weight that mis keeps; negative: its own
    correction_high: float = -1.0  # largest weight; negative: the correction's own
    updates: int = 1  # of the optimizer in a step, each on its share of the groups
    discount: float = 1.0  # of later rewards, per token; ppo and reinforce_pp
    gae_lambda: float = 1.0  # ppo: from one-step advantages, 0, to those of whole trajectories, 1
    value_clip: float = 0.2  # ppo: how far a value may move in a step without losing its gradient
    value_coefficient: float = 0.5  # ppo: of the value loss beside the policy's


@dataclass(frozen=True)
class LoraConfig:
    rank: int = 0  # of the adapters that are trained in place of the model; 0: the model itself
    alpha: float = 32.0  # what adapters add is multiplied by alpha / rank
    targets: list[str] = field(default_factory=list)  # projections; empty: all that take adapters

    @property
    def scale(self) -> float:
        """What the product of an adapter's factors is multiplied by."""
        return self.alpha / self.rank if self.rank else 0.0


@dataclass(frozen=True)
class OptimizerConfig:
    muon_lr: float = 0.003  # matrices; 0: AdamW on everything
    adamw_lr: float = 0.001
    weight_decay: float = 0.0
    warmup_steps: int = 5
    final_lr: float = 0.1  # share of the learning rate that is left at the last step
    clip_norm: float = 1.0


@dataclass(frozen=True)
class TrainingConfig:
    bin_tokens: int = 2560  # token budget of a bin, the unit of training work
    dtype: str = "float32"  # of passes: float32 | bfloat16; what is trained stays float32
    activation_checkpointing: bool = False  # layers are computed again on the way back
    checkpoint_every: int = 8  # steps; those since are repeated from their records
    keep_checkpoints: int = 3
    deterministic: bool = False  # rounds wait for the whole batch, so that runs can be compared
    bin_deadline_s: float = (
        20.0  # a hybrid's bin that is not back by then is recomputed by the core
    )
    ranks: int = 1  # workers that share the core: each holds its rows of the parameters
    rank_deadline_s: float = 120.0  # for the others in a collective; past it a rank counts as lost


@dataclass(frozen=True)
class WarmStartConfig:
    demonstrations: str = ""  # module:function; empty: no warm start
    steps: int = 420
    batch: int = 64  # demonstrations a step
    muon_lr: float = 0.02
    adamw_lr: float = 0.003
    warmup_steps: int = 20
    decay: float = 0.4  # share of the steps, at the end, in which the learning rate falls to 0


@dataclass(frozen=True)
class EvaluationDataset:
    name: str  # what its figures are called by
    path: str  # rows as in dataset.held_out
    problems: int = 256  # its first ones
    samples: int = 1  # of each problem
    temperature: float = 1.0  # 0: greedy
    pass_at: list[int] = field(default_factory=list)  # each k of pass@k, at most `samples`
    solved: float = 1.0  # reward from which a sample counts as right


@dataclass(frozen=True)
class EvaluationConfig:
    every: int = 10  # steps; 0: only before and after
    before: bool = True
    after: bool = True
    problems: int = 256  # of the held-out set
    datasets: list[EvaluationDataset] = field(default_factory=list)  # beside the held-out set
    best: str = ""  # figure whose best version is kept, as held_out.greedy; empty: none
    hold_s: float = 900.0  # that the next step may wait for the evaluation of the last


@dataclass(frozen=True)
class BudgetConfig:
    steps: int = 48


@dataclass(frozen=True)
class TrackingConfig:
    tensorboard: bool | str = False  # true: files in RUN/tensorboard; or in that directory
    wandb: str = ""  # project; empty: not there
    trackio: str = ""  # project; empty: not there


@dataclass(frozen=True)
class PlannerConfig:
    interval_s: float = 1.0  # between two looks at the stage times
    imbalance: float = 1.15  # ratio of the two stage times from which a move is considered
    gain: float = 0.05  # share of the iteration time a move must save
    warmup_steps: int = 1
    cooldown_steps: int = 3
    min_rollout: int = 1
    training: int = 1  # gangs that train in the default split; the others roll out


@dataclass(frozen=True)
class JobConfig:
    name: str = "job"
    out: str = ""  # run directory; empty: runs/<name>
    seed: int = 0
    cache: str = "~/.cache/meshrl"  # warm starts; empty: none
    mesh: MeshConfig = field(default_factory=MeshConfig)
    model: ModelConfigSection = field(default_factory=ModelConfigSection)
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
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)

    @property
    def min_group(self) -> int:
        """Scored members below which a group is dropped."""
        chosen, size = self.algorithm.min_group, self.algorithm.group_size
        return chosen if chosen >= 0 else max(min(2, size), size - 2)

    @property
    def jailed(self) -> list[str]:
        """Its tools and rewards that run code which the model wrote."""
        rewards = [part.use for part in self.reward.declared]
        return builtin.jailed([*self.environment.tools.values(), *rewards])

    @property
    def supervised(self) -> bool:
        """Whether trajectories are given by the dataset instead of sampled."""
        return self.algorithm.name == "sft"

    def document(self) -> dict[str, Any]:
        """The job as plain data, for Redis and for `--dry-run`."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> JobConfig:
        """The inverse of `document`; ConfigError names a key that is unknown or mistyped."""
        built: JobConfig = build(cls, document, "")
        return built


def build(cls: type[Any], values: dict[str, Any], prefix: str) -> Any:
    """A config dataclass from plain data, checked key by key; ConfigError names the dotted key."""
    hints = get_type_hints(cls)
    known = {f.name for f in fields(cls)}
    unknown = [prefix + key for key in values if key not in known]
    if unknown:
        raise ConfigError(f"unknown key {unknown[0]}")
    needed = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
    if missing := [prefix + key for key in needed if key not in values]:
        raise ConfigError(f"{missing[0]} is missing")
    return cls(**{key: _value(hints[key], value, prefix + key) for key, value in values.items()})


def _value(kind: Any, value: Any, key: str) -> Any:
    if is_dataclass(kind):
        if not isinstance(value, dict):
            raise ConfigError(f"{key} is a table, not {value!r}")
        return build(kind, value, key + ".")  # type: ignore[arg-type]
    origin = getattr(kind, "__origin__", kind)
    of = next((a for a in getattr(kind, "__args__", ()) if is_dataclass(a)), None)
    if origin is list and of is not None and isinstance(value, list):
        return [_value(of, item, f"{key}[{i}]") for i, item in enumerate(value)]
    if origin is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, origin) or (origin is int and isinstance(value, bool)):
        name = getattr(origin, "__name__", origin)
        raise ConfigError(f"{key} must be {name}, not {value!r}")
    return value
