"""A sample of the native engine, and what of it the caller has not had yet."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tandem.generation.pending import PendingSample
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
        strings = self.request.sampling.stop_strings
        # A token is at least a byte of text; a few more give the decoder the context of the first one.
        tail = max(len(string.encode()) for string in strings) + 8
        text = tokenizer.decode(token_ids[-tail:].tolist(), skip_special_tokens=False)
        return any(string in text for string in strings)
