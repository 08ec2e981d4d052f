"""A conversation as a tree of exact tokens; its branches are what is trained on.

    prompt ids --the policy--> Node --what the world said--> longer prompt ids --the policy--> Node …

A node is one turn of the policy. The tokens that it was asked with begin with all tokens of its parent, bit for bit,
or it has no parent: nothing is ever tokenised a second time. Where history is rewritten, a new root begins.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tandem.types import BoolArray, Branch, Completion, FloatArray, IntArray, Picture, Turn

Spell = Callable[[Sequence[int]], str]
"""The text of tokens, control tokens spelled out."""
_NO_VERSION = -1
"""The policy version of tokens that no policy made."""


@dataclass(eq=False, slots=True)
class Node:
    """One turn of the policy."""

    parent: "Node | None"
    prompt_ids: IntArray
    """All tokens that the policy was asked with."""
    completion: Completion
    author: str = "user"
    """Of the tokens between the parent's and the end of `prompt_ids`."""
    reward: float | None = None
    """What the environment gave for this turn."""
    trained: bool = True
    """False where nobody has taken the answer: nothing that followed depends on it."""
    pictures: tuple[Picture, ...] = ()
    """Those among `prompt_ids`."""

    @property
    def ids(self) -> IntArray:
        """The tokens that it was asked with, and those that it sampled."""
        return np.concatenate((self.prompt_ids, self.completion.token_ids))

    def ancestry(self) -> "list[Node]":
        """From the root to this node."""
        return [*(self.parent.ancestry() if self.parent else []), self]


@dataclass(slots=True)
class TokenTree:
    """The turns of the policy in one trajectory, in the order in which they were asked for."""

    nodes: list[Node] = field(default_factory=list[Node])

    def branches(self, spell: Spell, first: Node | None = None) -> list[Branch]:
        """From a root to each leaf, in the order of the leaves, but that the one of the leaf `first` begins. Each
        sampled token is in the loss mask of the first branch that has it, and of no other; branches without such tokens
        are left out, but for the only one."""
        trained: dict[int, list[Turn]] = {}
        leaves = sorted(self._leaves(), key=lambda leaf: leaf is not first)
        branches = [_branch(leaf.ancestry(), trained, spell) for leaf in leaves]
        return [branch for branch in branches if branch.loss_mask.any()] or branches[:1]

    def _leaves(self) -> Iterator[Node]:
        parents = {id(node.parent) for node in self.nodes}
        return (node for node in self.nodes if id(node) not in parents)


def _branch(line: list[Node], trained: dict[int, list[Turn]], spell: Spell) -> Branch:
    """The tokens along `line`; `trained` has the turns of the nodes of earlier branches, and gets these."""
    prompt_ids = line[0].prompt_ids
    ids: list[IntArray] = []
    mask: list[BoolArray] = []
    logprobs: list[FloatArray] = []
    versions: list[IntArray] = []
    turns: list[Turn] = []
    end = len(prompt_ids)
    for node in line:
        made, told = node.completion, node.prompt_ids[end:]
        fresh = node.trained and id(node) not in trained
        if id(node) not in trained:
            trained[id(node)] = _turns(node, told, spell)
        turns += trained[id(node)]
        ids += [told, made.token_ids]
        mask += [np.zeros(len(told), np.bool_), np.full(len(made.token_ids), fresh)]
        logprobs += [np.zeros(len(told), np.float32), made.logprobs * np.float32(fresh)]
        versions += [np.full(len(told), _NO_VERSION, np.int32), made.versions]
        end = len(node.prompt_ids) + len(made.token_ids)
    return Branch(
        prompt_ids=prompt_ids,
        response_ids=np.concatenate(ids).astype(np.int32),
        loss_mask=np.concatenate(mask),
        rollout_logprobs=np.concatenate(logprobs).astype(np.float32),
        versions=np.concatenate(versions).astype(np.int32),
        turns=tuple(turns),
        experts=line[-1].completion.experts,
        opening=spell(prompt_ids.tolist()),
        pictures=line[-1].pictures,
    )


def _turns(node: Node, told: IntArray, spell: Spell) -> list[Turn]:
    """What the policy was `told` before the node, and its turn."""
    made = node.completion.token_ids
    before = [Turn(node.author, len(told), text=spell(told.tolist()))] if len(told) else []
    return [*before, Turn("policy", len(made), node.reward, spell(made.tolist()))]
