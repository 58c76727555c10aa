"""Lets SGLang compute adapters on a host without an accelerator, where torch pins no memory.

It asks for pinned memory, from which an accelerator copies sooner, and does not start without.
Ordinary memory holds the same numbers. Torch is changed when SGLang's adapters are first looked
for, in this process alone.
"""

import functools
import importlib.abc
import sys

MAKERS = ("empty", "tensor", "zeros")


class PinNothing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "sglang.srt.lora":
            sys.meta_path.remove(self)
            import torch

            if not torch.accelerator.is_available():
                torch.Tensor.pin_memory = lambda tensor, device=None: tensor
                for maker in MAKERS:
                    setattr(torch, maker, unpinned(getattr(torch, maker)))
        return None  # the usual finders find it


def unpinned(make):
    @functools.wraps(make)
    def made(*arguments, pin_memory=False, **options):
        return make(*arguments, **options)

    return made


sys.meta_path.insert(0, PinNothing())
