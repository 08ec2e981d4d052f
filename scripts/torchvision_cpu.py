"""Lets torchvision's wheel, which is built for CUDA, be imported beside torch for CPUs; scripts/vllm-env installs it.

vLLM looks at models that see pictures through it. Its compiled operators cannot load there, and its Python wants to
find them by name: they are declared just before it is imported. Resizing and normalising are plain torch; boxes do not
work.
"""

import importlib.abc
import sys
from typing import Any

_OPERATORS = """nms qnms roi_align qroi_align _roi_align_backward roi_pool _roi_pool_backward ps_roi_align
    _ps_roi_align_backward ps_roi_pool _ps_roi_pool_backward deform_conv2d _deform_conv2d_backward"""


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing; it is asked first."""

    libraries: tuple[Any, ...] = ()
    """What they declare goes with them."""

    def find_spec(self, fullname: str, *_: Any) -> None:
        if fullname != "torchvision" or self.libraries:
            return
        import torch

        if torch.version.cuda is None:
            self.libraries = (torch.library.Library("torchvision", "DEF"),)
            for name in _OPERATORS.split():
                self.libraries[0].define(f"{name}(Tensor input) -> Tensor")


sys.meta_path.insert(0, _BeforeTorchvision())
