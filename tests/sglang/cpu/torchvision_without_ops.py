"""Import hook that lets torchvision be imported without operators compiled for this torch.

At its import, torchvision registers two operators with torch.compile, and fails if they are not
declared. The hook declares them before that import; they are never called.
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
