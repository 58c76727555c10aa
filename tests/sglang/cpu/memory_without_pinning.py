"""Lets SGLang compute adapters on a host without an accelerator, where torch pins no memory.

It asks for pinned memory, from which an accelerator copies sooner, and does not start without.
Ordinary memory holds the same numbers. Torch is changed when SGLang's adapters are first looked
for, in this process alone.
"""

import functools
import importlib.abc
import sys
from collections.abc import Callable
from typing import Any

MAKERS = ("empty", "tensor", "zeros")


class PinNothing(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "sglang.srt.lora":
            sys.meta_path.remove(self)
            import torch

            if not torch.accelerator.is_available():
                torch.Tensor.pin_memory = leave_unpinned  # type: ignore[assignment, method-assign]
                for maker in MAKERS:
                    setattr(torch, maker, unpinned(getattr(torch, maker)))
        return None  # the usual finders find it


def leave_unpinned(tensor: Any, device: object = None) -> Any:
    return tensor


def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*arguments: Any, pin_memory: bool = False, **options: Any) -> Any:
        return make(*arguments, **options)

    return made


sys.meta_path.insert(0, PinNothing())
