"""What others have published for the same quantities."""

_PRIME_RL = "prime-rl, H100"
_UNSLOTH = "Unsloth"

PUBLISHED: dict[tuple[str, str, str], tuple[float, str]] = {
    ("decoding", "tokens", "1 row"): (418, "vLLM, H100: 2.39 ms a token at light load"),
    ("long_rows", "tokens", "16,384 tokens"): (11_900, _PRIME_RL),
    ("long_rows", "share of 989 TFLOP/s", "16,384 tokens"): (0.111, _PRIME_RL),
    ("long_rows", "peak", "16,384 tokens"): (12.5, _PRIME_RL),
    ("long_rows", "tokens", "65,536 tokens"): (10_150, _PRIME_RL),
    ("long_rows", "share of 989 TFLOP/s", "65,536 tokens"): (0.268, _PRIME_RL),
    ("long_rows", "peak", "65,536 tokens"): (19.6, _PRIME_RL),
    ("sft", "tokens", "rows of 8,192 tokens"): (26_000, _PRIME_RL),
    ("sft", "share of 989 TFLOP/s", "rows of 8,192 tokens"): (0.168, _PRIME_RL),
    ("sft", "peak", "rows of 8,192 tokens"): (31.7, _PRIME_RL),
    ("shared_prompts", "faster by", "8 answers of 256 after 2,048"): (2.55, _UNSLOTH),
    ("branches", "faster by", "20 leaves"): (3.75, "prime-rl"),
    ("grpo_step", "decoded tokens", ""): (18_800, "nano-vllm, scaled by the memory's bandwidth to an H100"),
}
"""By check, figure and case. The memory of prime-rl is what its allocator reserved, not what was allocated."""
