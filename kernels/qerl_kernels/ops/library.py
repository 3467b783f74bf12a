"""The library the operators are registered in.

`Library` rather than `custom_op`: no per-call alias check; some are called for every linear layer.
"""

import torch

LIB = torch.library.Library("qerl", "FRAGMENT")


def define(schema: str) -> None:
    """Declare `qerl::<schema>`, an operator that neither mutates nor aliases its arguments."""
    LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
