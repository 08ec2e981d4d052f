"""How many bytes a vision tower takes while a micro-batch's pictures pass through it: formulas, no torch.

Tokens are those that pictures take in the text; of each, `tower.patches` pass through the layers. A learning tower's
activations stay from its forward pass, before the text's, to its backward pass, after the text's. A frozen one keeps
what it makes of pictures, and nothing else. tests/unit/test_planning_tower.py holds these to the fake step.
"""

from dataclasses import dataclass

from tandem.planning.tower_shape import TowerShape

KEPT_FEATURES = 2**28
"""`tandem/models/tower.py`: bytes of features that a frozen tower keeps for later passes, at most."""
KEPT_PIXELS = 2**28
"""The same file: bytes of host memory in which a tower keeps what it takes of pictures, at most."""


@dataclass(frozen=True, slots=True)
class TowerPass:
    """A tower, and the pictures of one micro-batch."""

    shape: TowerShape
    tokens: int
    item_bytes: int
    checkpointing: bool

    @property
    def patches(self) -> int:
        return self.tokens * self.shape.patches

    def features(self) -> int:
        """What the text gets."""
        return (1 + self.shape.deeper) * self.tokens * self.shape.out * self.item_bytes

    def passing(self) -> int:
        """Inside a layer of a pass without gradients, where queries and keys are rotated in float32; or in its
        feed-forward part."""
        shape, item = self.shape, self.item_bytes
        rotating = 6 * 4 * shape.width + 5 * item * shape.width
        forward = item * (3 * shape.feed_forward if shape.gated else 2 * shape.feed_forward) + 3 * item * shape.width
        return self.patches * (max(rotating, forward) + self._rotation() + (4 + item) * shape.patch_numbers)

    def kept(self) -> int:
        """What waits for the tower's backward pass."""
        shape, item = self.shape, self.item_bytes
        layer = item * shape.width if self.checkpointing else self._saved_in_layer()
        deeper = shape.deeper * 3 * item * shape.width
        around = deeper + self._rotation() + item * shape.patch_numbers
        return self.patches * (shape.layers * layer + around) + self._merging()

    def returning(self) -> int:
        """What there is of it inside the backward pass of the last layer's feed-forward part, behind the merger's."""
        shape, item = self.shape, self.item_bytes
        again = self._saved_in_layer() - (0 if shape.gated else item * shape.width) if self.checkpointing else 0
        gradients = item * (2 * shape.feed_forward + shape.width)
        return self.kept() - self._merging() + self.patches * (again + gradients)

    def _merging(self) -> int:
        """What the last merger keeps."""
        return self.patches * (self._normed() + 2 * self.item_bytes * self.shape.width)

    def _rotation(self) -> int:
        """Bytes of a patch's cosines and sines, in float32."""
        return 2 * 4 * (self.shape.width // self.shape.heads)

    def _normed(self) -> int:
        """Bytes of a patch that a norm keeps, its output among them; one by hand keeps a float32 copy."""
        item, width = self.item_bytes, self.shape.width
        copied = 4 if self.shape.gated and item != 4 else 0
        return (2 * item + copied) * width

    def _saved_in_layer(self) -> int:
        """Bytes of a patch that autograd keeps of a layer."""
        shape, item = self.shape, self.item_bytes
        factors = {"qwen2_vl": 3, "qwen2_5_vl": 4}.get(shape.family, 2)
        attention = item * 7 * shape.width + 4 * shape.heads
        return 2 * self._normed() + attention + item * factors * shape.feed_forward
