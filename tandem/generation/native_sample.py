"""A sample of the native engine, and what of it the caller has not had yet."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tandem.generation.pending import PendingSample
from tandem.generation.stopping import holds_stop_string
from tandem.types import Completion, Delta, FloatArray, IntArray, PromptLogprobs, Status, TopLogprobs


@dataclass(eq=False, slots=True)
class NativeSample(PendingSample):
    """A sample that waits for a slot or decodes in one."""

    sent: int = 0
    """The number of tokens that the caller has had in deltas."""
    top: list[tuple[IntArray, FloatArray]] = field(default_factory=list[tuple[IntArray, FloatArray]])
    """The most probable tokens and their log-probs at each token, where the request wants them."""
    prompt: PromptLogprobs | None = None
    """The prompt's log-probs, where the request wants them, until they have been delivered."""

    def deliver(self, token_ids: IntArray, logprobs: FloatArray, versions: IntArray, status: Status | None) -> None:
        """The arrays hold all tokens that the sample has so far; `status` None: it goes on."""
        if self.streamed:
            new = slice(self.sent, None)
            token_ids, logprobs, versions = token_ids[new].copy(), logprobs[new].copy(), versions[new].copy()
            top, prompt = self._take_top(), self.prompt
            self.results.put_nowait(Delta(self.index, token_ids, logprobs, versions, status, top, prompt))
            self.sent, self.prompt = self.sent + len(token_ids), None
        elif status is not None:
            top = self._take_top()
            completion = Completion(self.index, token_ids, logprobs, versions, status, top=top, prompt=self.prompt)
            self.results.put_nowait(completion)

    def _take_top(self) -> TopLogprobs | None:
        """Returns those that have not been delivered yet, and forgets them."""
        new, self.top = self.top, []
        if not new:
            return None
        return TopLogprobs(np.stack([token_ids for token_ids, _ in new]), np.stack([logprobs for _, logprobs in new]))

    def ends_in_stop_string(self, token_ids: IntArray, tokenizer: Any) -> bool:
        """`token_ids`: those that this request has so far."""
        request = self.request
        before = request.token_ids[len(request.token_ids) - request.made :]
        return holds_stop_string(np.concatenate((before, token_ids)), request.sampling.stop_strings, tokenizer)
