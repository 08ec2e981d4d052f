"""The models of a run: where they are, what of them learns, how messages become their text."""

from typing import Any, ClassVar, Literal

from tandem.config.base import MayChange, PositiveInt, Section
from tandem.config.paths import LocalPath, ModelPath


class LoraConfig(Section):
    """Low-rank adapters learn, the model's own weights stay as they are (the extra `lora`). A value head is new, and
    learns as a whole."""

    rank: PositiveInt = 16
    alpha: PositiveInt = 32
    """The adapters' share is scaled by alpha / rank."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Ends of the names of the layers that get one; `all-linear`: every linear layer but the output layer. Experts that
    a mixture holds together get none."""


class ChatTemplateConfig(Section):
    """How messages become text. What is given here is in the tokenizer that the run saves, too."""

    FREE_TEXT: ClassVar[tuple[str, ...]] = ("system_prompt",)

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
    """Model directory that the critic starts from; default: `path`. It reads the policy's tokens: its tokenizer, if it
    has one, must be that of `path`, and it must have rows for all of them."""
    teacher_path: ModelPath | None = None
    """Model directory of the teacher that `algorithm.type: on_policy_distillation` learns from, of any size. Its
    tokenizer must be that of `path`."""
    reward_model_path: ModelPath | None = None
    """Model directory of `tandem reward-model`, or of a published model with a head of one number: its score is the
    reward, on top of `reward.functions` if there are any. With the tokenizer and chat template of `path` it reads the
    policy's tokens, else the conversation by its own (docs/rewards.md)."""
    judge_path: ModelPath | None = None
    """Model directory of a language model that judges answers, as `reward.judge` says."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in forward, backward and generation; the optimizer always keeps float32 masters."""
    trust_remote_code: MayChange[bool] = False
    """Run Python code that the model directory brings. Only for directories you trust."""
    lora: LoraConfig | None = None
    """Train adapters in place of the weights of the model at `path`: the policy, or the reward model of `tandem
    reward-model`, with its value head."""
    critic_lora: LoraConfig | None = None
    """Train adapters and the value head in place of all of the critic's weights."""
    chat_template: ChatTemplateConfig | None = None
    vision_tower: Literal["train", "frozen"] = "train"
    """Of a model that sees pictures. frozen: its weights stay, and what it makes of a picture is computed once.
    With `lora` they stay in any case, with `critic_lora` the critic's: adapters are beside the layers that read text
    alone."""
