"""How models write calls of tools: one reader a format, by the name that `conversation.calls` takes."""

from tandem.rollout.formats.calls.base import ReadsAnswer
from tandem.rollout.formats.calls.deepseek import read_deepseek
from tandem.rollout.formats.calls.gpt_oss import read_gpt_oss
from tandem.rollout.formats.calls.hermes import read_hermes
from tandem.rollout.formats.calls.lfm2 import read_lfm2
from tandem.rollout.formats.calls.llama3 import read_llama3
from tandem.rollout.formats.calls.mistral import read_mistral
from tandem.rollout.formats.calls.response_template import GEMMA4, by_response_template
from tandem.rollout.formats.calls.xml import read_glm, read_qwen3_coder

READERS: dict[str, ReadsAnswer] = {
    "deepseek": read_deepseek,
    "gemma4": by_response_template(GEMMA4),
    "glm": read_glm,
    "gpt_oss": read_gpt_oss,
    "hermes": read_hermes,
    "lfm2": read_lfm2,
    "llama3": read_llama3,
    "mistral": read_mistral,
    "qwen3_coder": read_qwen3_coder,
}
_WRITES = {
    "gpt_oss": ("<|channel|>", "<|start|>assistant"),
    "glm": ("<arg_key>",),
    "qwen3_coder": ("<function=", "<parameter="),
    "mistral": ("[TOOL_CALLS]",),
    "deepseek": ("<｜tool▁calls▁begin｜>",),
    "gemma4": ("<|tool_call>call:",),
    "lfm2": ("<|tool_call_start|>",),
    "llama3": ("<|start_header_id|>ipython",),
    "hermes": ("<tool_call>", "arguments"),
}
"""What the chat templates of a format all write; the first format that fits is taken."""


def written_by(template: str) -> str | None:
    """The name of the format in which a chat template writes calls, None where it is none of those."""
    return next((name for name, signs in _WRITES.items() if all(sign in template for sign in signs)), None)
