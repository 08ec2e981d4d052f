"""prime-rl's trainer of January 2026 (commit 32adbba80), its memory behaviour rebuilt on fake CUDA tensors.

FSDP2 a layer, recomputed layers, float32 masters, an output layer whose vocabulary is cut into pieces of 2,048. Its
repository publishes peaks of reserved memory, here is what is allocated: `benchmarks/plan_memory.py` compares them.
Prints the peak in bytes.
"""

# ruff: noqa: E402 - fake CUDA tensors have to be there before torch is

import argparse
from types import MethodType
from typing import Any

from tandem.planning.trace.pretend import pretend

pretend()

import torch
import torch.distributed as dist
import transformers.models.qwen3.modeling_qwen3 as qwen3
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen3Config

from tandem.planning.trace.ledger import Ledger

SIZES = {"0.6b": (1024, 16, 3072), "4b": (2560, 32, 9728)}
"""Hidden size, heads, width of the feed-forward layer."""
PIECE = 2048


class Head(torch.autograd.Function):
    """Log-probs and entropy, a piece of the vocabulary at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        maximum = torch.full((len(hidden),), -torch.inf, device=hidden.device)
        total, weighted = torch.zeros_like(maximum), torch.zeros_like(maximum)
        for first in range(0, len(weight), PIECE):
            logits = (hidden @ weight[first : first + PIECE].t()).float()
            maximum = torch.maximum(maximum, logits.max(1).values)
            exp = torch.exp(logits - maximum[:, None])
            total, weighted = total + exp.sum(1), weighted + (exp * logits).sum(1)
        log_total = maximum + total.log()
        ctx.save_for_backward(hidden, weight, log_total)
        return -log_total, log_total - weighted / total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, log_total = ctx.saved_tensors
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for first in range(0, len(weight), PIECE):
            piece = weight[first : first + PIECE]
            softmax = torch.exp((hidden @ piece.t()).float() - log_total[:, None])
            grad = -gradients[0][:, None] * softmax
            grad_hidden.add_(grad.to(hidden.dtype) @ piece)
            grad_weight[first : first + PIECE].add_(grad.to(weight.dtype).t() @ hidden)
        return grad_hidden, grad_weight, None


def flash(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    scale = query.shape[-1] ** -0.5
    attended = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, False, scale=scale)[0]
    return attended.transpose(1, 2).contiguous(), None


def make_model(size: str, layers: int) -> Any:
    hidden, heads, width = SIZES[size]
    AttentionInterface.register("of_fake_tensors", flash)
    qwen3.create_causal_mask = lambda *_, **__: None
    config = Qwen3Config(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8, head_dim=128,
        intermediate_size=width, vocab_size=151936, tie_word_embeddings=True, use_cache=False,
        max_position_embeddings=262144,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="of_fake_tensors")
    for name, layer in list(model.model.layers.named_children()):
        model.model.layers.register_module(name, checkpoint_wrapper(layer, preserve_rng_state=False))
    model.lm_head.forward = MethodType(lambda self, x, labels: Head.apply(x, self.weight, labels), model.lm_head)

    def forward(self: Any, ids: Tensor, positions: Tensor) -> Any:
        hidden = self.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        return self.lm_head(hidden[0], ids[0])

    model.forward = MethodType(forward, model)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=list(SIZES))
    for name in ("world", "tokens", "layers"):
        parser.add_argument(name, type=int)
    given = parser.parse_args()
    size, world, tokens, layers = given.size, given.world, given.tokens, given.layers
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    mesh = init_device_mesh("cuda", (world,))
    how: Any = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)}
    ledger = Ledger("cuda")
    with FakeTensorMode(allow_non_fake_inputs=True), ledger:
        with torch.device("meta"):
            model = make_model(size, layers)
        for layer in model.model.layers:
            fully_shard(layer, **how)
        fully_shard(model, **how)
        model.to_empty(device="cuda")
        ledger.enter(model.parameters(), "weights")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        ids = torch.zeros(1, tokens, dtype=torch.long, device="cuda")

        def step() -> None:
            for _ in range(2):
                logprobs, _entropy = model(ids, ids)
                (logprobs * logprobs).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        ledger.phase(step)  # the moments are made
        print(ledger.phase(step).total)


if __name__ == "__main__":
    main()
