"""The typed configuration tree. Sizes carry their unit in the name; validators raise, and rewrite paths alone."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator

from tandem.config.algorithms import AlgorithmConfig, CriticConfig, OwnAlgorithmConfig, PreferenceConfig
from tandem.config.base import (
    MayChange,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Share,
    by_type,
)
from tandem.config.conversation import ConversationConfig
from tandem.config.generation import GenerationConfig, NativeGenerationConfig
from tandem.config.judging import JudgeConfig
from tandem.config.mixture import MixtureConfig, SetName
from tandem.config.paths import CheckpointPath, DataPaths, LocalPath, ModelPath, Reference
from tandem.config.sampler import EpochsSamplerConfig, SamplerConfig
from tandem.config.tracking import TrackingConfig
from tandem.config.training import FsdpTrainingConfig, TrainingConfig
from tandem.config.validation import ValSetConfig


class LoraConfig(Section):
    """Low-rank adapters learn, the policy's own weights stay as they are (the extra `lora`)."""

    rank: PositiveInt = 16
    alpha: PositiveInt = 32
    """The adapters' share is scaled by alpha / rank."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Ends of the names of the layers that get one; `all-linear`: every linear layer but the output layer. Experts that
    a mixture holds together get none."""


class ChatTemplateConfig(Section):
    """How messages become text. What is given here is in the tokenizer that the run saves, too."""

    file: LocalPath | None = None
    """A Jinja template in the place of the tokenizer's own."""
    arguments: dict[str, Any] = {}
    """What the template reads besides the messages, such as `enable_thinking: false`."""
    system_prompt: str | None = None
    """The system message of conversations that begin without one."""


class ModelConfig(Section):
    path: ModelPath
    """Hugging Face model directory (config, safetensors, tokenizer), or an id of the Hub. A run directory stands for
    the model of its newest checkpoint, as `RUN/checkpoints/latest` does, and `RUN/checkpoints/best` for that of the
    best one."""
    critic_path: ModelPath | None = None
    """Model directory that the critic starts from; default: `path`."""
    teacher_path: ModelPath | None = None
    """Model directory of the teacher that `algorithm.type: on_policy_distillation` learns from, of any size. Its
    tokenizer must be that of `path`."""
    reward_model_path: ModelPath | None = None
    """Model directory of `tandem reward-model`: its score is the reward, on top of `reward.functions` if there are any.
    Its tokenizer must be that of `path`."""
    judge_path: ModelPath | None = None
    """Model directory of a language model that judges answers, as `reward.judge` says."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in forward, backward and generation; the optimizer always keeps float32 masters."""
    trust_remote_code: MayChange[bool] = False
    """Run Python code that the model directory brings. Only for directories you trust."""
    lora: LoraConfig | None = None
    """Train adapters in place of the policy's weights; a critic trains its own weights."""
    chat_template: ChatTemplateConfig | None = None
    vision_tower: Literal["train", "frozen"] = "train"
    """Of a model that sees pictures. frozen: its weights stay, and what it makes of a picture is computed once."""


class ImagesConfig(Section):
    """Pictures of rows (docs/pictures.md): each is resized once, and stored."""

    min_pixels: PositiveInt | None = None
    """A smaller picture is enlarged to as many. Default: that of the model's image processor."""
    max_pixels: PositiveInt | None = None
    """A larger one is reduced to as many. Default: that of the model's image processor."""
    max_image_tokens: PositiveInt | None = None
    """A row whose pictures take more tokens is a bad row. Default: no limit but that of the row's length."""
    directory: MayChange[LocalPath | None] = None
    """The store, which all nodes must see and several runs may share. Default: `pictures/` in the run directory; of
    `tandem eval`, `~/.cache/tandem/pictures`."""
    max_source_pixels: PositiveInt = Field(default=50_000_000, le=178_956_970)
    """A picture that has more before it is resized is a bad row, found before it is decoded."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels: {self.min_pixels:,} is more than max_pixels: {self.max_pixels:,}")
        return self


class VideosConfig(Section):
    """Videos of rows, which are lists of frames (docs/pictures.md#videos)."""

    max_frames: PositiveInt = 768
    """Of a longer video as many are taken, evenly from the first to the last."""
    fps: PositiveFloat = 2.0
    """Frames a second of a video whose row does not say it."""
    min_pixels: PositiveInt | None = None
    """A frame that has fewer is enlarged to as many. Default: the family's rule."""
    max_pixels: PositiveInt | None = None
    """One that has more is reduced to as many. Default: the family's rule."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels: {self.min_pixels:,} is more than max_pixels: {self.max_pixels:,}")
        return self


class RowCacheConfig(Section):
    """Where tokenised rows of large files are kept, from which they are read through a memory map (docs/data.md)."""

    directory: LocalPath | None = None
    """Runs may share it, and it may be deleted at any time. Default: `~/.cache/tandem/rows`."""
    files_from_mib: NonNegativeFloat | None = 4.0
    """Smaller files are tokenised at each start and kept in memory; null: all files are."""
    workers: PositiveInt | None = None
    """Processes that tokenise. Default: as many as CPUs that the command may use."""


class DataFilesConfig(Section):
    """Parquet or JSON-lines (also .gz), and ids of the Hub: `hub:OWNER/NAME/CONFIGURATION[SPLIT]`."""

    train_files: DataPaths = []
    mixture: MixtureConfig = {}
    """In the place of `train_files`: sets by name, each with its share of the rows (docs/data.md)."""
    val_files: DataPaths = []
    shuffle: bool = True
    """A new order every epoch, from `trainer.seed`."""
    on_bad_row: Literal["error", "skip"] = "error"
    images: ImagesConfig = ImagesConfig()
    videos: VideosConfig = VideosConfig()
    cache: MayChange[RowCacheConfig] = RowCacheConfig()

    @field_validator("mixture")
    @classmethod
    def _is_alone(cls, mixture: MixtureConfig, info: ValidationInfo) -> MixtureConfig:
        if mixture and info.data.get("train_files"):
            raise ValueError("give the files as train_files or as sets of mixture, not both")
        return mixture

    @property
    def train_paths(self) -> list[Path]:
        """`train_files`, or those of all sets one after another."""
        return self.train_files + [path for one in self.mixture.values() for path in one.files]

    @property
    def train_key(self) -> str:
        """The key that names them."""
        return "data.mixture" if self.mixture else "data.train_files"

    @property
    def val_paths(self) -> list[Path]:
        """All files of rows to validate on."""
        return self.val_files


class DataConfig(DataFilesConfig):
    """One row a prompt."""

    val_sets: dict[SetName, ValSetConfig] = {}
    """Besides `val_files`: sets by name, each with a sampling and metrics of its own (docs/data.md)."""
    dataset: Reference | None = None
    """A class whose rows are trained on, `path/to/file.py:Class` or `package.module:Class`, made with the files of
    `train_files` (docs/data.md)."""
    dataset_arguments: dict[str, Any] = {}
    """What it is made with besides, by name."""
    sampler: SamplerConfig = EpochsSamplerConfig()
    prompts_per_step: PositiveInt = 128
    max_prompt_tokens: PositiveInt = 1024
    """A longer prompt is a bad row."""

    @field_validator("dataset")
    @classmethod
    def _has_no_sets(cls, dataset: str | None, info: ValidationInfo) -> str | None:
        if dataset is not None and info.data.get("mixture"):
            raise ValueError("mixture is of sets of files; leave it out, or mix rows in the class")
        return dataset

    @field_validator("sampler")
    @classmethod
    def _draws_from_one_set(cls, sampler: SamplerConfig, info: ValidationInfo) -> SamplerConfig:
        if sampler.type != "epochs" and info.data.get("mixture"):
            raise ValueError(f"type: {sampler.type} draws from one set; leave out mixture, or take epochs")
        return sampler

    @property
    def val_paths(self) -> list[Path]:
        """`val_files`, then those of all sets one after another."""
        return self.val_files + [path for one in self.val_sets.values() for path in one.files]


class SftDataConfig(DataFilesConfig):
    """One row a demonstration (`messages`, or `prompt` + `completion`), or a pair of answers (`chosen`, `rejected`)."""

    rows_per_step: PositiveInt = 128
    max_tokens: PositiveInt = 2048
    """Prompt and answer together; a longer row is a bad row."""


class RewardFunctionConfig(Section):
    function: Reference
    """`path/to/file.py:function` or `package.module:function`."""
    weight: float = 1.0
    arguments: dict[str, Any] = {}
    """Further arguments of every call, by name."""
    score_together: str | None = None
    """A column, such as `extra_info.problem`: a function of `completions` scores prompts of a step that are alike in it
    in one call."""


def _form(function: object) -> str:
    return "reference" if isinstance(function, str) else "with_options"


RewardFunctionForm = Annotated[
    Annotated[RewardFunctionConfig, Tag("with_options")] | Annotated[Reference, Tag("reference")], Discriminator(_form)
]


class RewardConfig(Section):
    functions: list[RewardFunctionForm] = []
    """Their weighted sum is the reward; empty: what the environment of a conversation gives, or where it gives nothing,
    the function that the built-in table has for the row's `data_source`."""
    environment_weight: float = 1.0
    """Factor of the environment's reward where it is added to that of `functions`."""
    model_weight: float = 1.0
    """Factor of the score of `model.reward_model_path`."""
    judge: JudgeConfig | None = None
    """A generative reward model; default: none, or with `model.judge_path` one with all defaults."""
    timeout_s: MayChange[PositiveFloat] = 30.0
    """For one call."""
    workers: MayChange[PositiveInt] = 2
    max_error_share: MayChange[Share] = 0.2
    """The run stops when a larger share of a step's or validation's answers lost their reward to errors and time-outs,
    or when so many were lost to environments that failed."""


class TrainerConfig(Section):
    run_dir: MayChange[LocalPath]
    steps: MayChange[PositiveInt | None] = None
    epochs: MayChange[PositiveInt | None] = None
    seed: NonNegativeInt = 0
    max_staleness: NonNegativeInt = 0
    """`tandem train`: the most policy versions between making a token and training on it. 0: a step's answers are made
    by the weights that it trains; k: generation runs up to k steps ahead of training, and no token is older."""
    eval_every: MayChange[NonNegativeInt] = 0
    """Steps between validations, and one before the first step; 0: never."""
    save_every: MayChange[NonNegativeInt] = 0
    """Steps between checkpoints; 0: no such rule. The last step is always saved."""
    save_every_s: MayChange[NonNegativeFloat] = 1800.0
    """A step that ends so long after the last checkpoint is saved, too: what a lost run costs at most. 0: no such rule.
    """
    save_rollouts: MayChange[bool] = True
    """With `max_staleness`, checkpoints hold the answers that were made ahead of training, with their scores: a resumed
    run need not make them again, and with `generation.partial_rollouts: false` it ends bit for bit as the undisturbed
    one. Where it is false on a resume, those that the checkpoint holds are made and scored anew."""
    keep_last: MayChange[PositiveInt] = 2
    """Checkpoints that stay; the best one stays besides."""
    checkpoint_url: MayChange[str | None] = None
    """Where each checkpoint is copied when it is complete, by what fsspec has a file system for, as `s3://bucket/run`;
    `keep_last` and the best one count there, too. `--resume URL` fetches the newest one, verifies it and goes on."""
    best_metric: MayChange[str | None] = None
    """A metric name: the checkpoint where it was best is kept as `best`."""
    best_mode: MayChange[Literal["max", "min"] | None] = None
    """Whether its highest or its lowest value is best. Default: the lowest of a loss, a KL or a count of failures, the
    highest of anything else."""
    trajectories_every: MayChange[NonNegativeInt] = 1
    """Steps between trajectory files; 0: none."""
    keep_trajectories: MayChange[NonNegativeInt] = 100
    """Trajectory files that stay, the newest ones, and as many of validation answers; 0: all."""
    resume: MayChange[bool] = False
    """Continue the run in `run_dir` from its last checkpoint; without one there, start."""
    branch_from: CheckpointPath | None = None
    """A run, or one of its checkpoints: this new run starts with the weights and optimizers that it holds, whatever
    else differs. With another `training.type` or type of optimizer, adapters on one side only, or as a reward model
    that begins as a policy, with the weights alone."""
    max_restarts: MayChange[NonNegativeInt] = 0
    """How often the run goes on from its last checkpoint by itself after workers died or hung."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of steps and epochs")
        return self

    @model_validator(mode="after")
    def _mode_of_a_metric(self) -> Self:
        if self.best_mode and not self.best_metric:
            raise ValueError(f"best_mode: {self.best_mode}, but there is no best_metric; give one, or leave it out")
        return self


class LocalClusterConfig(Section):
    """This machine: one rank is this process itself, more are processes of their own."""

    type: Literal["local"] = "local"
    ranks: PositiveInt | None = None
    """Processes of the one pool that all roles share, default 1; not together with `placement.pools`."""
    timeout_s: PositiveFloat = 1800.0
    """A call that takes a worker longer ends the run, with the stacks of all ranks; of several optimizer steps in one
    call, each. So does an engine that runs so long without ending an answer."""


class RayClusterConfig(Section):
    """Ray: one machine or many."""

    type: Literal["ray"]
    ranks: PositiveInt | None = None
    """Processes of the one pool that all roles share, default 1; not together with `placement.pools`."""
    address: str | None = None
    """Where a cluster runs, as `ray.init` takes it; default: that of the environment, else a new local cluster."""
    timeout_s: PositiveFloat = 1800.0
    """A call that takes a worker longer ends the run, with the stacks of all ranks; of several optimizer steps in one
    call, each. So does an engine that runs so long without ending an answer."""


ClusterConfig = Annotated[
    Annotated[LocalClusterConfig, Tag("local")] | Annotated[RayClusterConfig, Tag("ray")], by_type("local")
]
RoleName = Literal["actor", "rollout", "critic", "reference", "teacher", "reward_model", "judge"]


class PlacementConfig(Section):
    """Which roles share processes. Roles on different pools work at the same time."""

    pools: dict[str, list[PositiveInt]] = {}
    """Processes on each node, by pool: `{main: [8, 8]}`. Default: one pool of `cluster.ranks`."""
    roles: dict[RoleName, str] = {}
    """The pool of each role; those left out are on the first pool."""

    def apart(self, one: RoleName, other: RoleName) -> bool:
        """The roles have different pools; one that is not named is in the first."""
        first = next(iter(self.pools), "")
        return self.roles.get(one, first) != self.roles.get(other, first)

    @model_validator(mode="after")
    def _pools_exist(self) -> Self:
        for role, pool in self.roles.items():
            if pool not in self.pools:
                raise ValueError(f"roles.{role}: pool {pool!r} is not in placement.pools ({', '.join(self.pools)})")
        if empty := [name for name, nodes in self.pools.items() if not nodes]:
            raise ValueError(f"pools.{empty[0]}: has no node; give processes a node, as [8]")
        return self


class Tree(Section):
    """A whole configuration: that of one command."""

    NOT_READ: ClassVar[tuple[str, ...]] = ()
    """Sections that are left out where the configuration file has them."""
    WITHOUT_USE: ClassVar[tuple[str, ...]] = ()
    """Keys of its sections that the command would not read, and refuses therefore."""


class ServeConfig(Tree):
    """`tandem serve`: how requests are answered that say nothing of it, and by what."""

    WITHOUT_USE: ClassVar[tuple[str, ...]] = (
        "model.critic_path",
        "model.teacher_path",
        "model.reward_model_path",
        "model.judge_path",
        "model.lora",
        "generation.eval",
        "generation.partial_rollouts",
        "generation.sleep",
        "generation.sync",
    )
    model: ModelConfig
    generation: GenerationConfig = NativeGenerationConfig()


class ModelsConfig(Tree):
    """What every command has that trains or evaluates models."""

    model: ModelConfig
    training: TrainingConfig = FsdpTrainingConfig()
    cluster: MayChange[ClusterConfig] = Field(default=LocalClusterConfig(), validate_default=True)

    def nodes_of(self, role: RoleName) -> list[int]:
        """Processes on each node of the role's pool."""
        return [self.cluster.ranks or 1]


class RunConfig(ModelsConfig):
    """What every training has."""

    trainer: TrainerConfig
    tracking: MayChange[TrackingConfig] = TrackingConfig()


class SftConfig(RunConfig):
    """`tandem sft`."""

    data: SftDataConfig

    @field_validator("trainer")
    @classmethod
    def _generates_nothing(cls, trainer: TrainerConfig) -> TrainerConfig:
        if trainer.max_staleness:
            raise ValueError(
                f"max_staleness: {trainer.max_staleness}, but this command generates no answers that could be stale; "
                "leave it out"
            )
        return trainer


class RewardModelConfig(SftConfig):
    """`tandem reward-model`."""


class DpoConfig(SftConfig):
    """`tandem dpo`."""

    preference: PreferenceConfig = PreferenceConfig()

    @field_validator("preference")
    @classmethod
    def _rows_to_mismatch(cls, preference: PreferenceConfig, info: ValidationInfo) -> PreferenceConfig:
        data = info.data.get("data")  # None where unsound
        if preference.loss == "kto" and data is not None and data.rows_per_step < 2:
            raise ValueError(
                "loss: kto estimates the KL from prompts with other rows' answers of the same step; "
                "give data.rows_per_step of 2 or more"
            )
        return preference


class RolloutConfig(ModelsConfig):
    """What every command has whose model answers prompts."""

    data: DataConfig
    generation: GenerationConfig = NativeGenerationConfig()
    conversation: ConversationConfig | None = None
    """Without it a prompt gets one answer."""
    reward: RewardConfig = RewardConfig()
    placement: MayChange[PlacementConfig] = Field(default=PlacementConfig(), validate_default=True)

    @field_validator("generation")
    @classmethod
    def _has_room_for_validation(cls, generation: GenerationConfig, info: ValidationInfo) -> GenerationConfig:
        data: DataConfig | None = info.data.get("data")  # None where unsound
        most = generation.max_response_tokens
        for name, one in (data.val_sets if data else {}).items():
            if one.max_response_tokens is not None and one.max_response_tokens > most:
                raise ValueError(
                    f"max_response_tokens: {most:,}, for which engines have room, is less than "
                    f"data.val_sets.{name}.max_response_tokens: {one.max_response_tokens:,}; raise it"
                )
        return generation

    @field_validator("placement")
    @classmethod
    def _fits_cluster(cls, placement: PlacementConfig, info: ValidationInfo) -> PlacementConfig:
        cluster = info.data.get("cluster")  # None where unsound
        if cluster and placement.pools:
            if cluster.ranks is not None:
                raise ValueError(
                    f"pools: say how many processes there are, so leave out cluster.ranks: {cluster.ranks}"
                )
            if cluster.type == "local" and any(len(nodes) > 1 for nodes in placement.pools.values()):
                raise ValueError("pools: cluster.type: local is one node; give each pool one number, or use ray")
        return placement

    @field_validator("reward")
    @classmethod
    def _has_one_judge(cls, reward: RewardConfig, info: ValidationInfo) -> RewardConfig:
        model = info.data.get("model")  # None where unsound
        if model is None or reward.judge is None:
            return reward
        if model.judge_path and reward.judge.url:
            raise ValueError(f"judge.url: {reward.judge.url}, but model.judge_path is a judge, too; give one of them")
        if not model.judge_path and not reward.judge.url:
            raise ValueError("judge: there is none; give its directory as model.judge_path, or a url")
        return reward

    @field_validator("placement")
    @classmethod
    def _judge_has_room(cls, placement: PlacementConfig, info: ValidationInfo) -> PlacementConfig:
        """Engines in processes of their own take a share of each device that nobody else has counted."""
        model, reward = info.data.get("model"), info.data.get("reward")  # None where unsound
        engine = reward.judge.generation.type if reward and reward.judge else "native"
        first = next(iter(placement.pools), "")
        roles: tuple[RoleName, ...] = ("actor", "rollout")
        shares = placement.roles.get("judge", first) in {placement.roles.get(role, first) for role in roles}
        if model and model.judge_path and engine != "native" and shares:
            raise ValueError(
                f"roles: reward.judge.generation.type: {engine} takes devices of its own; give judge a pool in "
                "placement.roles, or use native"
            )
        return placement

    @property
    def judged_elsewhere(self) -> bool:
        """Something else than reward functions gives rewards."""
        model = self.model
        judged = self.reward.judge is not None or model.judge_path is not None
        return judged or model.reward_model_path is not None or self.conversation is not None

    @field_validator("placement")
    @classmethod
    def _engine_keeps_its_weights(cls, placement: PlacementConfig, info: ValidationInfo) -> PlacementConfig:
        """While a reward model scores on the engine's devices the engine sleeps, and may have to answer again after."""
        model, generation = info.data.get("model"), info.data.get("generation")  # None where unsound
        drops_weights = generation and generation.type != "native" and generation.sleep == "weights"
        first_pool = next(iter(placement.pools), "")
        shared = placement.roles.get("reward_model", first_pool) == placement.roles.get("rollout", first_pool)
        if model and model.reward_model_path and drops_weights and shared:
            raise ValueError(
                "roles: model.reward_model_path scores on the engine's devices, which must keep its weights meanwhile; "
                "set generation.sleep: cache, or place reward_model on a pool of its own"
            )
        return placement

    def nodes_of(self, role: RoleName) -> list[int]:
        pools = self.placement.pools
        if not pools:
            return super().nodes_of(role)
        return pools[self.placement.roles.get(role, next(iter(pools)))]


class EvalConfig(RolloutConfig):
    """`tandem eval`, which takes a configuration of `tandem train`, too."""

    NOT_READ: ClassVar[tuple[str, ...]] = ("algorithm", "trainer", "tracking")
    seed: NonNegativeInt = 0
    """Draws the answers, where `generation.eval.temperature` is not 0."""


class TrainConfig(RolloutConfig, RunConfig):
    """`tandem train` and `tandem check`."""

    algorithm: AlgorithmConfig = Field(default={"type": "grpo"}, validate_default=True)

    @field_validator("algorithm")
    @classmethod
    def _fits(cls, algorithm: AlgorithmConfig, info: ValidationInfo) -> AlgorithmConfig:
        model, data = info.data.get("model"), info.data.get("data")  # None where unsound
        if model and model.critic_path and not isinstance(algorithm, CriticConfig):
            raise ValueError(f"{algorithm.type} has no critic; remove model.critic_path or use algorithm.type: ppo")
        if data and data.prompts_per_step < algorithm.minibatches:
            prompts = f"data.prompts_per_step: {data.prompts_per_step}"
            raise ValueError(f"minibatches: {algorithm.minibatches} cannot share {prompts}; lower it")
        trainer = info.data.get("trainer")
        if isinstance(algorithm, CriticConfig) and trainer and trainer.steps:
            warmup, steps = algorithm.critic_warmup_steps, trainer.steps
            if warmup >= steps:
                raise ValueError(f"critic_warmup_steps: {warmup} leaves the policy none of trainer.steps: {steps}")
        return algorithm

    @field_validator("algorithm")
    @classmethod
    def _can_refresh_its_reference(cls, algorithm: AlgorithmConfig, info: ValidationInfo) -> AlgorithmConfig:
        if not algorithm.kl.refresh_steps:
            return algorithm
        model, training, placement = (info.data.get(key) for key in ("model", "training", "placement"))
        refused = None  # sections are None where unsound
        if model and model.lora:
            refused = "with model.lora the reference is the policy without adapters, which nothing changes"
        elif training and training.type != "fsdp":
            refused = f"training.type: {training.type} cannot copy weights from the policy; use fsdp"
        elif placement and placement.apart("actor", "reference"):
            refused = "actor and reference are in different pools; place them in one"
        if refused:
            raise ValueError(f"kl.refresh_steps: {refused}, or leave it out")
        return algorithm

    @field_validator("algorithm")
    @classmethod
    def _has_its_teacher(cls, algorithm: AlgorithmConfig, info: ValidationInfo) -> AlgorithmConfig:
        model = info.data.get("model")  # None where unsound
        if model is None or isinstance(algorithm, OwnAlgorithmConfig):
            return algorithm
        served = algorithm.served_teacher
        if algorithm.has_teacher and model.teacher_path is None and served is None:
            raise ValueError(
                f"{algorithm.type} learns from a teacher; give its directory as model.teacher_path, or the section "
                "algorithm.teacher of a served one"
            )
        if served is not None and model.teacher_path:
            raise ValueError("teacher: model.teacher_path is another one; give one of them")
        if model.teacher_path and not algorithm.has_teacher:
            mend = "remove model.teacher_path or use algorithm.type: on_policy_distillation"
            raise ValueError(f"{algorithm.type} has no teacher; {mend}")
        return algorithm

    @field_validator("algorithm")
    @classmethod
    def _can_ask_its_teacher(cls, algorithm: AlgorithmConfig, info: ValidationInfo) -> AlgorithmConfig:
        generation, training = info.data.get("generation"), info.data.get("training")  # None where unsound
        if algorithm.served_teacher is not None and generation and generation.temperature != 1:
            raise ValueError(
                "teacher: servers tell log-probs at temperature 1, and the student's would be at "
                f"generation.temperature: {generation.temperature:g}; give 1, or a model.teacher_path"
            )
        if algorithm.top_tokens and training and training.type != "fsdp":
            raise ValueError(f"top_k: training.type: {training.type} tells no distributions yet; use fsdp, or top_k: 0")
        return algorithm

    @field_validator("algorithm")
    @classmethod
    def _corrects_for_staleness(cls, algorithm: AlgorithmConfig, info: ValidationInfo) -> AlgorithmConfig:
        if trainer := info.data.get("trainer"):  # None where unsound
            algorithm.check_staleness(trainer.max_staleness)
        return algorithm

    @property
    def critic_warmup_steps(self) -> int:
        """Steps at the beginning in which the policy stays as it is."""
        return self.algorithm.critic_warmup_steps if isinstance(self.algorithm, CriticConfig) else 0

    @property
    def takes_engine_logprobs(self) -> bool:
        """The generation engine's log-probs stand in for those of the old policy, so that the ratio of the loss is to
        the policy that drew each token, whatever its version."""
        return self.algorithm.rollout_correction.takes_engine_logprobs(self.trainer.max_staleness)


def pictures_directory(config: TrainConfig | EvalConfig | SftConfig) -> Path:
    """Where the pictures of a run's rows are stored."""
    if config.data.images.directory is not None:
        return config.data.images.directory
    if isinstance(config, EvalConfig):
        return Path("~/.cache/tandem/pictures").expanduser()
    return config.trainer.run_dir / "pictures"
