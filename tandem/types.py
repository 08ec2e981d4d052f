"""The nouns: what flows between the stages.

    rows -> Prompt -> Request -> Completion -> Trajectory -> Score -> Group -> Batch -> MicroBatch -> gradients

Everything here is numpy and plain Python, so that it imports in milliseconds and crosses process borders. Token ids,
versions and groups are int32, log-probs and rewards float32, offsets and indices int64.

Array suffixes: `_B` rows, one a branch of a trajectory (an answer of one turn has one), `_T` response tokens of all
rows, head to tail, `_N` tokens of a micro-batch, prompts included, `_S` those of them that are predicted. `offsets` has
one entry more than there are rows: row `i` is `values[offsets[i]:offsets[i + 1]]`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

Array = TypeVar("Array")
OtherArray = TypeVar("OtherArray")
IntArray = np.ndarray[Any, np.dtype[np.integer[Any]]]
FloatArray = np.ndarray[Any, np.dtype[np.float32]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]


class Status(StrEnum):
    """How a trajectory ended. Only completed and truncated ones carry a reward into the loss."""

    COMPLETED = "completed"  # by a stop token or a stop string
    TRUNCATED = "truncated"  # at generation.max_response_tokens
    ABORTED = "aborted"
    ENVIRONMENT_ERROR = "environment_error"  # its environment failed, each time that it was tried
    REWARD_ERROR = "reward_error"  # the reward function raised, or its process died
    REWARD_TIMEOUT = "reward_timeout"
    NOT_SCORED = "not_scored"  # every reward function returned None


class VideoStep(NamedTuple):
    """Where two frames of a video stand in it; their tokens are encoded as those of one picture are."""

    time: int
    """Positions after the beginning of the video."""
    span: int
    """Positions from the beginning of the video to what follows it; 0: its next two frames follow."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture among token ids, as it travels: its pixels stay where they are stored."""

    key: str
    """SHA-256 of its size and pixels, in hexadecimal: the name that it is stored under."""
    grid: tuple[int, int]
    """Rows and columns of its features, each of which takes a token."""
    place: int
    """Where the first of them stands among the token ids, the prompt's and then the response's where there are both:
    rows * columns times the model's placeholder, head to tail but for what some models have between rows and tiles."""
    tiles: tuple[int, int] = (1, 1)
    """Rows and columns of tiles that it is cut into, where its model does that; known until its tokens are there."""
    step: VideoStep | None = None
    """Of two frames of a video, which are stored one below the other; None: it is a picture."""

    @property
    def content(self) -> tuple[str, bool]:
        """Equal where a model makes the same features of both."""
        return self.key, self.step is not None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A data row that is ready to ask."""

    index: int
    """Position of the row in its data set, over all its files."""
    token_ids: IntArray
    """Chat template applied, special tokens included, and of each picture as many placeholders as it takes tokens."""
    text: str
    data_source: str
    """Chooses the reward function and names the validation metrics."""
    ground_truth: Any
    row: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The data row as read, every column, for reward functions that ask for columns by name."""
    pictures: tuple[Picture, ...] = ()
    """In the order in which they stand in `token_ids`."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A data row to imitate: supervised fine-tuning's counterpart of a trajectory."""

    index: int
    prompt_ids: IntArray
    response_ids: IntArray
    """Everything after the prompt, later user turns included."""
    loss_mask: BoolArray
    pictures: tuple[Picture, ...] = ()
    """Of prompt and response, in the order in which they stand there."""


@dataclass(frozen=True, slots=True)
class Preference:
    """A data row with two answers to one prompt, of which one is better."""

    chosen: Demonstration
    rejected: Demonstration
    margin: float = 0.0
    """By how much it is better, in units of a reward model's score."""


@dataclass(frozen=True, slots=True)
class RatedAnswer:
    """A data row with one answer, which is good or bad."""

    answer: Demonstration
    desirable: bool


LEAST_TEMPERATURE = 0.01
"""vLLM draws at this one where it is asked for a lower one, and at far lower ones divided logits are infinite."""


def check_temperature(temperature: float) -> float:
    """The temperature itself. ValueError where engines would not draw at it."""
    if temperature != 0 and not LEAST_TEMPERATURE <= temperature < math.inf:
        raise ValueError(f"give 0, which is greedy, or at least {LEAST_TEMPERATURE}")
    return temperature


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn: temperature, then top-k, then top-p."""

    temperature: float = 1.0
    """0 is greedy, else at least LEAST_TEMPERATURE."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """Token ids to continue `len(seeds)` times."""

    token_ids: IntArray
    sampling: SamplingParams
    seeds: tuple[int, ...]
    """One a sample. The same seed gives the same tokens whatever else is in the batch (on one device)."""
    top_logprobs: int = 0
    """How many of the most probable tokens at each position come with each sample."""
    prompt_logprobs: bool = False
    """The prompt's own log-probs come with each sample."""
    made: int = 0
    """How many of the last `token_ids` the policy made in this answer, which goes on here: stop strings may begin in
    them, and no random number that they took is used again. `sampling.max_tokens` counts new tokens alone."""
    keep: bool = False
    """A further request may go on from these tokens and those made here: the engine may keep what it has computed for
    them. It changes no answer."""
    pictures: tuple[Picture, ...] = ()
    """In the order in which they stand in `token_ids`."""

    def seed(self, sample: int) -> int:
        """The seed of a sample in an engine whose random numbers begin anew with each request, below 2**63.

        One that goes on needs another seed than it began with: the numbers that chose its first tokens would choose
        the next ones, which would not be drawn independently of them.
        """
        seed = self.seeds[sample] & 0x7FFF_FFFF_FFFF_FFFF
        if self.made == 0:
            return seed
        return int(np.random.SeedSequence([seed, self.made]).generate_state(1, "u8")[0] >> np.uint64(1))


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The most probable tokens at each of some positions, in falling order."""

    token_ids: IntArray
    """`[T, top_logprobs of the request]`."""
    logprobs: FloatArray
    """`[T, top_logprobs]`: at the temperature of the log-probs that they stand beside."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The log-probs of a prompt's tokens but the first, which nothing predicts."""

    logprobs: FloatArray
    """`[prompt - 1]`: log softmax(logits), at temperature 1."""
    top: TopLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One sample of a request."""

    sample: int
    """Index into the request's `seeds`."""
    token_ids: IntArray
    """`[T]`; a stop token is included, the text after a stop string is not cut."""
    logprobs: FloatArray
    """`[T]`: log softmax(logits / temperature) at each token, before top-k and top-p (greedy: at 1)."""
    versions: IntArray
    """`[T]`: the policy version that made each token."""
    status: Status
    experts: IntArray | None = None
    """`[prompt and response, but for its last token, layers, top_k]`: those that a mixture of experts sent each token
    to, where the engine tells."""
    top: TopLogprobs | None = None
    """At each token, where the request wants them."""
    prompt: PromptLogprobs | None = None
    """Where the request wants them."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The tokens that a sample of a streamed request has gained since the delta before; of a Completion in parts."""

    sample: int
    token_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    status: Status | None = None
    """None: the sample goes on."""
    top: TopLogprobs | None = None
    """As in Completion, at these tokens."""
    prompt: PromptLogprobs | None = None
    """As in Completion, in the first delta."""


Message = dict[str, Any]
"""One message of a conversation, as chat templates take it: `role`, `content`, and what else belongs to the role:
`tool_calls`, `tool_call_id`, `name`, `reasoning_content`. A call's arguments are an object."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A run of response tokens with one author."""

    author: str
    """`policy`, or what answered it: `tool`, `user`, `environment`."""
    tokens: int
    reward: float | None = None
    """What the environment gave for a turn of the policy, where it gives rewards by turn."""
    text: str | None = None
    """The tokens decoded, control tokens spelled out; None in an answer of one turn, which `Trajectory.text` is."""


@dataclass(slots=True)
class Branch:
    """One line of exact tokens through a conversation: what a row of a batch trains on. Arrays as in Trajectory."""

    prompt_ids: IntArray
    response_ids: IntArray
    loss_mask: BoolArray
    """False also on what the policy made and an earlier branch of the trajectory has: each token is trained once."""
    rollout_logprobs: FloatArray
    versions: IntArray
    turns: tuple[Turn, ...] = ()
    experts: IntArray | None = None
    opening: str = ""
    """The prompt decoded, control tokens spelled out; a trajectory has that of its first branch as `Prompt.text`."""
    pictures: tuple[Picture, ...] = ()
    """Of prompt and response, in the order in which they stand there."""

    @property
    def prompt_pictures(self) -> tuple[Picture, ...]:
        return tuple(picture for picture in self.pictures if picture.place < len(self.prompt_ids))

    @property
    def response_pictures(self) -> tuple[Picture, ...]:
        """What the policy was shown later, places counted from the first token of the prompt."""
        return self.pictures[len(self.prompt_pictures) :]


@dataclass(slots=True)
class Trajectory:
    """One complete attempt at a prompt; response arrays have one entry a response token, tool tokens included."""

    prompt: Prompt
    """Of a conversation, with the tokens that it was opened with."""
    sample: int
    response_ids: IntArray
    loss_mask: BoolArray
    """True on tokens that the policy made and that the loss may train on."""
    rollout_logprobs: FloatArray
    """Log-probs from the generation engine; 0 where `loss_mask` is False."""
    versions: IntArray
    text: str
    """The response decoded, special tokens left out: what reward functions read. Where the conversation goes on in a
    further branch, the responses of all of them."""
    status: Status
    turns: tuple[Turn, ...] = ()
    generation_s: float = 0.0
    experts: IntArray | None = None
    """As in Completion."""
    messages: tuple[Message, ...] = ()
    """What was said after the prompt, by the policy and to it; empty where the answer is one turn of text."""
    opened_with: tuple[Message, ...] = ()
    """What was said before `messages`: not always what the data row holds. Empty where the answer is one turn of
    text."""
    last_turn: Status | None = None
    """How the policy's last turn ended; None where there are no turns, or the answer is one turn of text, whose status
    is the trajectory's."""
    branches: tuple[Branch, ...] = ()
    """Further lines of tokens, where the conversation left the first one, which the arrays above are: its history was
    rewritten, or the policy was asked anew. They share the trajectory's reward."""
    ends_in: int = -1
    """The branch that the trajectory ended in: its place in `every_branch`."""
    reward: float | None = None
    """What the environment gave, all turns together; None where it gives none."""
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    """What was counted on the way, such as calls of tools; each becomes a metric."""
    error: str | None = None
    """Why the environment failed, or why there was no room for an answer."""
    pictures: tuple[Picture, ...] = ()
    """Those in the response, which tools and environments have shown: `Branch.response_pictures` of the first
    branch."""

    @property
    def every_branch(self) -> tuple[Branch, ...]:
        """The branch that the arrays above are, and the further ones."""
        own = Branch(
            self.prompt.token_ids,
            self.response_ids,
            self.loss_mask,
            self.rollout_logprobs,
            self.versions,
            self.turns,
            self.experts,
            opening=self.prompt.text,
            pictures=self.prompt.pictures + self.pictures,
        )
        return (own, *self.branches)


@dataclass(frozen=True)  # no slots: it is pickled often, which they make slow
class Score:
    """The verdict on one trajectory. `value` is None exactly when `failure` says why there is none."""

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Further numbers of the reward function; each becomes a metric. `acc` is the core validation metric."""
    prediction: str | None = None
    """The extracted answer (`pred`), which majority voting needs."""
    failure: Status | None = None
    error: str | None = None
    seconds: float = 0.0
    environment_weight: float = 0.0
    """By what factor the environment's reward is in `value`; 0: it is not."""
    judgement: str | None = None
    """What a judge has replied, at last."""


@dataclass(slots=True)
class Group:
    """The siblings: all trajectories of one prompt in one step, with their scores."""

    trajectories: list[Trajectory]
    scores: list[Score]
    greedy: Score | None = None
    """The score of the prompt's greedy answer, which is not among the trajectories; where the algorithm needs one."""


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """The answers to a prompt that were made ahead of training, and that no step has taken yet."""

    group: Group
    """Without scores where these are due together with those of others of its step, or a reward failed."""
    greedy: Trajectory | None = None
    """The greedy answer, where it is wanted and has no score yet."""
    kept: bool | None = None
    """Dynamic sampling has kept it for a step, or dropped it; None: neither yet. A resumed run does not decide anew:
    draws were admitted because others were dropped."""


@dataclass(slots=True)
class TokenColumns(Generic[Array]):
    """One number a response token, or several; a column that nothing has filled is None. numpy at rest, torch inside an
    engine."""

    rollout_logprobs: Array | None = None
    old_logprobs: Array | None = None
    """Those of the old policy, which the ratio of most losses is to (`LossConfig.divides_by`): the trainer's, by the
    weights before the first optimizer step on this batch, or the engine's (`config/ratio.py`). None: those of the
    optimizer step's own pass."""
    trainer_logprobs: Array | None = None
    """The trainer's log-probs, by the weights before the first optimizer step, once the update is done; NaN where no
    pass has told them. What the engine's are compared with."""
    ref_logprobs: Array | None = None
    teacher_logprobs: Array | None = None
    teacher_top_ids: Array | None = None
    """`[T, k]`: the tokens that the teacher finds the most probable, whichever was sampled."""
    teacher_top_logprobs: Array | None = None
    """`[T, k]`: the teacher's log-probs of them; minus infinity where it names one token less."""
    values: Array | None = None
    """The critic's values: the expected return before the token is emitted."""
    squared_probs: Array | None = None
    """The sum over the vocabulary of the squared probabilities of the policy before the first optimizer step."""
    turn_rewards: Array | None = None
    """The part of the trajectory's reward that a turn of the policy earned, on the last token of the turn, 0 on others;
    where an environment gives rewards by turn."""
    advantages: Array | None = None
    returns: Array | None = None
    """What the critic regresses to."""
    importance_weights: Array | None = None
    """Rollout correction: what the surrogate of the policy loss is multiplied with, for the engine drew the token by
    other log-probs than the trainer's. KL and entropy are not."""
    loss_weights: Array | None = None
    """What the token weighs in the loss: loss = sum(loss_weights * token_loss) over all micro-batches and ranks."""
    shares: Array | None = None
    """1 / number of trained tokens, on trained tokens: sum(shares * x) is the token mean of x."""
    selected: Array | None = None
    """bool: tokens that the loss treats apart, where it does."""
    trajectories: Array | None = None
    """Filled in a micro-batch: tokens with the same number are of one trajectory. Where the loss is not `token_local`,
    all of the trajectory's tokens in the loss mask are there, whichever branch they are in."""

    def map(self, function: Callable[[Array], OtherArray]) -> "TokenColumns[OtherArray]":
        """The columns with `function` applied to each that is filled."""
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        return TokenColumns(**{name: function(column) for name, column in columns.items() if column is not None})

    def slice(self, start: int, stop: int) -> "TokenColumns[Array]":
        """Tokens `start … stop`: a view."""
        return self.map(lambda column: column[start:stop])  # type: ignore[index]


@dataclass(slots=True)
class Batch:
    """Trajectories as ragged columns, never padded: what the advantage is computed on and optimizer steps train on.

    A row is a branch: most trajectories have one.
    """

    prompt_ids: IntArray
    """Tokens of picture i of `pictures` are -1 - i: prompts whose tokens are alike show the same pictures."""
    prompt_offsets: IntArray
    response_ids: IntArray
    """Of pictures as in `prompt_ids`."""
    response_offsets: IntArray
    loss_mask: BoolArray
    """`[T]`; all False on a row that has no reward."""
    versions: IntArray
    groups: IntArray
    """`[B]`: rows with the same number are of siblings."""
    trajectories: IntArray
    """`[B]`: rows with the same number are branches of one trajectory; in a whole step from 0 on, and ascending."""
    prompts: IntArray
    """`[B]`: rows with the same number have the same prompt tokens, which a micro-batch computes once."""
    rewards: FloatArray
    """`[B]`: of the trajectory."""
    scored: BoolArray
    """`[B]`: False on rows whose reward failed. They take no part in group statistics, loss or metrics."""
    tokens: TokenColumns[np.ndarray[Any, Any]]
    experts: IntArray | None = None
    """`[all prompt tokens, then all response tokens, layers, top_k]`: as in Completion; a row's last token has any."""
    pictures: tuple[Picture, ...] = ()
    """Each once, whichever rows show it: `place` is that of the first one that does."""

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def row_of_token(self) -> IntArray:
        """`[T]`: the row of each response token."""
        return np.repeat(np.arange(len(self)), np.diff(self.response_offsets))

    @property
    def trajectory_of_token(self) -> IntArray:
        """`[T]`: the number, in `trajectories`, of the trajectory of each response token."""
        return np.repeat(self.trajectories.astype(np.int64), np.diff(self.response_offsets))

    def tokens_by_row(self, mask_T: BoolArray) -> IntArray:
        """`[B]`: how many of each row's response tokens are in the mask."""
        if mask_T.all():
            return np.diff(self.response_offsets)
        filled_B, counts_B = np.diff(self.response_offsets) > 0, np.zeros(len(self), dtype=np.int64)
        if filled_B.any():
            counts_B[filled_B] = np.add.reduceat(mask_T, self.response_offsets[:-1][filled_B], dtype=np.int64)
        return counts_B

    @property
    def first_branches(self) -> IntArray:
        """The row of the first branch of each trajectory, where rows are in the order of a step."""
        return np.flatnonzero(np.diff(self.trajectories, prepend=-1))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward and backward pass sees: *segments* of tokens, head to tail.

    A segment sees itself causally and, before that, all of its prefix and what that continues: answers to one prompt
    continue it, prompts may continue what they have in common, and each is computed once. A row's last token is left
    out: it predicts nothing.
    """

    token_ids: IntArray
    """Of pictures as in Batch."""
    offsets: IntArray
    prefixes: IntArray
    """`[segments]`: the number of the segment that each continues, which stands before it; -1: none."""
    predicted_at: IntArray
    """`[S]`: positions in `token_ids` whose hidden states predict the targets; a prompt's last one often."""
    targets: IntArray
    """`[S]`: the tokens whose log-prob, entropy or value is wanted."""
    columns: TokenColumns[np.ndarray[Any, Any]]
    """`[S]`, aligned with `targets`."""
    source: IntArray
    """`[S]`: where in the batch's response tokens each target stands."""
    experts: IntArray | None = None
    """`[N, layers, top_k]`: the experts to send each token to, where that was recorded."""
    pictures: tuple[Picture, ...] = ()
    """Those of the batch; not all of them need be here."""


@dataclass(slots=True)
class Outputs(Generic[Array]):
    """What a model computes for predicted tokens (`_S`, as in MicroBatch), float32. What was not asked for is None."""

    logprobs_S: Array | None = None
    """log softmax(logits / temperature) at the token that was chosen."""
    entropy_S: Array | None = None
    """Entropy of softmax(logits / temperature), nats."""
    values_S: Array | None = None
    squared_probs_S: Array | None = None
    """Sum of softmax(logits / temperature) squared; of a forward pass without gradient."""
    top_ids_S: Array | None = None
    """`[S, k]`: the most probable tokens, of a forward pass of an engine that is made with `TopTokens`."""
    top_logprobs_S: Array | None = None
    """`[S, k]`: log-probs of these, or, of a pass with a loss, of the tokens in `columns.teacher_top_ids`."""

    def slice(self, start: int, stop: int) -> "Outputs[Array]":
        """Scored tokens `start … stop`: a view."""
        return self.map(lambda column: column[start:stop])  # type: ignore[index]

    def map(self, function: Callable[[Array], OtherArray]) -> "Outputs[OtherArray]":
        """The columns with `function` applied to each that is filled."""
        columns = (getattr(self, f.name) for f in fields(self))
        return Outputs(*(None if column is None else function(column) for column in columns))


class TokenLoss(Protocol[Array]):
    """A loss that is a sum over tokens: (outputs, columns) of some predicted tokens -> (their loss, their metrics).

    Each token's term, and a metric that is a part of the loss, is multiplied by `columns.loss_weights`, a metric that
    is a mean by `columns.shares`, and the results of all micro-batches are summed: neither depends on how the step was
    cut.
    """

    @property
    def token_local(self) -> bool:
        """A token's term depends on that token's outputs and columns alone: slices of a micro-batch may be passed."""
        ...

    def __call__(self, outputs: Outputs[Array], columns: TokenColumns[Array]) -> tuple[Array, dict[str, Array]]: ...


StepMetrics = dict[str, float]
"""Metric name (`stage/what/stat`, listed in docs/metrics.md) to value, for one step."""
