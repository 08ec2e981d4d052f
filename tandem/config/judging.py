"""The section `reward.judge`: a language model that reads answers, says what it thinks of them, and is read."""

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from tandem.config.base import MayChange, PositiveFloat, PositiveInt, Section, rule
from tandem.config.generation import GenerationConfig, NativeGenerationConfig
from tandem.config.paths import LocalPath, Reference


class JudgeConfig(Section):
    """A generative reward model: `model.judge_path`, or a served one at `url`."""

    FREE_TEXT: ClassVar[tuple[str, ...]] = ("rubric",)

    url: str | None = None
    """Up to `/v1`, of any OpenAI-compatible server, in the place of `model.judge_path`."""
    model: str | None = None
    """Its name at `url`."""
    api_key_env: MayChange[str] = "OPENAI_API_KEY"
    """The variable that holds the key of `url`, if there is one."""
    concurrency: MayChange[PositiveInt] = 32
    """Requests at once to `url`."""
    rubric: str = "Is the answer correct, complete and helpful?"
    """What the judge is to look at: the template's `{rubric}`."""
    template: LocalPath | None = None
    """A text file with what the judge is told, in the place of the built-in text (docs/rewards.md)."""
    parser: Reference = "number"
    """How its reply is read: `number`, `verdict`, or `path/to/file.py:function` of yours."""
    most: PositiveFloat = 10.0
    """number: the best score, which becomes 1."""
    verdicts: dict[str, float] = {"yes": 1.0, "no": 0.0}
    """verdict: what each word is worth."""
    weight: float = 1.0
    """Factor of the judge's reward, which is added to that of `reward.functions`."""
    attempts: PositiveInt = 2
    """Replies that are asked for until one can be read. The first is greedy, later ones are drawn."""
    unparsed: float | None = None
    """The judge's reward where no reply can be read; null: the answer loses its reward, which counts as an error."""
    generation: GenerationConfig = Field(default=NativeGenerationConfig(max_response_tokens=512), validate_default=True)
    """Of `model.judge_path`: its engine. `temperature` is that of later attempts."""

    @rule()
    def _has_url_and_model(self) -> Iterator[str]:
        if (self.url is None) != (self.model is None):
            given, lacking = ("model", "url") if self.url is None else ("url", "model")
            yield f"{given}: a served judge has a url and a model; give {lacking}, too"

    @rule()
    def _has_a_parser(self) -> Iterator[str]:
        if self.parser not in ("number", "verdict") and ":" not in self.parser:
            yield f"parser: {self.parser!r} is neither number nor verdict, nor path/to/file.py:function"
