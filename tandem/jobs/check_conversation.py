"""Whether the chat template holds the conversations of a configuration: tried on rows, tools and a reply to each."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tandem.config.conversation import ConversationConfig, EndpointEnvironmentConfig
from tandem.config.model import ModelConfig
from tandem.errors import UserError
from tandem.files import users_traceback
from tandem.models.loading import stop_token_ids
from tandem.pictures.prepare import BadPicture
from tandem.pictures.shown import ModelPictures
from tandem.rollout.conversation_images import Lines, stored_aside
from tandem.rollout.environment import EnvironmentFailed, Environments, ToolSchema
from tandem.rollout.environments.tools import opening_messages
from tandem.rollout.formats.for_tokenizer import make_format
from tandem.rollout.formats.format_check import problems
from tandem.rollout.make import make_environments
from tandem.types import Message, Prompt

Opening = tuple[Sequence[Message], Sequence[ToolSchema]]


def conversation_problems(
    config: ConversationConfig,
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    max_prompt_tokens: int,
    pictures: ModelPictures | None = None,
) -> Iterator[str]:
    """A sentence for each thing that is wrong with the conversations that these prompts open, each once; the first that
    opens with more than `max_prompt_tokens` is one. `pictures`: of a model that sees them.

    It opens the environments for it, and so what they share, such as connections to servers. Raises UserError.
    """
    tokens = make_format(tokenizer, stop_token_ids(model, tokenizer), config.calls, config.thinking)
    try:
        openings = asyncio.run(_openings(config, prompts, pictures))
    except EnvironmentFailed as error:
        yield f"an environment does not start: {error}"
        return
    said, lines = set[str](), Lines(tokens, pictures)
    long = isinstance(config.environment, EndpointEnvironmentConfig)  # an agent asks what it likes: none of it is here
    for prompt, (messages, tools) in zip(prompts, openings, strict=True):
        if not long and (length := len(lines.open(messages, tools).ids)) > max_prompt_tokens:
            long = True
            yield (
                f"data row {prompt.index}: its conversation opens with {length:,} tokens, with what its environment "
                f"adds; data.max_prompt_tokens is {max_prompt_tokens:,}, and memory is planned by it"
            )
        for problem in problems(tokens, messages, tools):
            if problem not in said:
                said.add(problem)
                yield f"data row {prompt.index}: {problem}"


async def _openings(
    config: ConversationConfig, prompts: Sequence[Prompt], pictures: ModelPictures | None
) -> list[Opening]:
    if isinstance(config.environment, EndpointEnvironmentConfig):  # what an agent says, nobody knows before
        return [(opening_messages(prompt), ()) for prompt in prompts]
    environments = make_environments(config.environment, pictures)
    try:
        await environments.open()
        return [await _opening(environments, prompt, pictures) for prompt in prompts]
    finally:
        await environments.close()


async def _opening(environments: Environments, prompt: Prompt, pictures: ModelPictures | None) -> Opening:
    environment = environments.make(prompt)
    try:
        return await stored_aside(await environment.start(prompt), pictures), list(environment.tools)
    except (UserError, EnvironmentFailed):
        raise
    except BadPicture as error:
        raise EnvironmentFailed(f"the environment shows what is no picture: {error}") from error
    except Exception as error:  # the environment may raise anything
        raise EnvironmentFailed(users_traceback(error, str(Path(__file__).parents[1]))) from error
    finally:
        await environment.close()
