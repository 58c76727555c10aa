"""Lets torchvision be imported beside a torch that its compiled operators were not built for.

It describes two operators to torch.compile while it is imported, and fails where nobody has
declared them. They are declared when torchvision is first looked for, and never called.
"""

import importlib.abc
import sys

OPERATORS = ("nms", "qnms")
SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class DeclareFirst(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for operator in OPERATORS:
                if not hasattr(torch.ops.torchvision, operator):
                    torch.library.define(f"torchvision::{operator}", SIGNATURE)
        return None  # the usual finders find it


sys.meta_path.insert(0, DeclareFirst())
