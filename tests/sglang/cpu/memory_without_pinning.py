"""Import hook that lets SGLang compute adapters on a host without an accelerator.

SGLang requires pinned memory, which torch cannot allocate there. Ordinary memory has the same
contents. The hook changes torch when SGLang's adapters are first imported, in this process alone.
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
                    setattr(torch, maker, without_pinning(getattr(torch, maker)))
        return None  # the usual finders find it


def leave_unpinned(tensor: Any, device: object = None) -> Any:
    return tensor


def without_pinning(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def make_unpinned(*arguments: Any, pin_memory: bool = False, **options: Any) -> Any:
        return make(*arguments, **options)

    return make_unpinned


sys.meta_path.insert(0, PinNothing())
