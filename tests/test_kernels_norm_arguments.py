"""What RMSNorm's operator and its launchers refuse, with the argument's name."""

import pytest
import torch

from qerl_kernels import norm, norm_cpu
from qerl_kernels.launch import interpreting
from qerl_kernels.ops.norm import rms_norm

EPS = 1e-5
INDEX = torch.zeros(3, dtype=torch.int32)
WRONG = {
    r"x must be floats \[\*, d\], found int64 \[3, 8\]": {"x": torch.zeros(3, 8).long()},
    r"weight must be floats \[8\], found float32 \[7\]": {"weight": torch.zeros(7)},
    r"weight must be floats \[8\], found int64": {"weight": torch.zeros(8).long()},
    r"offset must be 0 when cast_first is true, found 1": {"offset": 1.0},
    r"noise must be float32 \[8\] without row_index, found float32 \[2, 8\]": {
        "noise": torch.zeros(2, 8)
    },
    r"noise must be float32 \[8\] without row_index, found bfloat16": {
        "noise": torch.zeros(8).bfloat16()
    },
    r"row_index must be int32 \[3\], found int64 \[3\]": {"row_index": INDEX.long()},
    r"row_index must be int32 \[3\], found int32 \[2\]": {"row_index": INDEX[:2]},
    r"row_index selects rows of noise": {"row_index": INDEX},
    r"noise must be float32 \[n, 8\] with row_index, found float32 \[8\]": {
        "row_index": INDEX,
        "noise": torch.zeros(8),
    },
}


def arguments(changed):
    base = {"x": torch.zeros(3, 8), "weight": torch.zeros(8), "noise": None, "row_index": None}
    return tuple(({**base, "eps": EPS, "offset": 0.0, "cast_first": True} | changed).values())


@pytest.mark.parametrize("message", WRONG)
def test_arguments_that_do_not_fit(message):
    args = arguments(WRONG[message])
    calls = [rms_norm] if "x must" in message else [rms_norm, interpreted_launcher]
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call(*args)
    on_meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]
    with pytest.raises(ValueError, match=message):
        rms_norm(*on_meta)


def interpreted_launcher(*args):
    with interpreting():
        return norm.rms_norm(*args)


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        (
            r"x must be bfloat16 or float16 or float32, found float64",
            {"x": torch.zeros(3, 8).double()},
        ),
        (r"x must be \[\*, \*\], found \[1, 3, 8\]", {"x": torch.zeros(1, 3, 8)}),
        (r"x must have stride 1 in its last dimension", {"x": torch.zeros(8, 3).t()}),
        (r"x must have at most 16384 features, has 16385", {"x": torch.zeros(1, 16385)}),
        (r"weight must be bfloat16 or .*, found float64", {"weight": torch.zeros(8).double()}),
        (r"weight must be contiguous", {"weight": torch.zeros(16)[::2]}),
        (r"noise must be contiguous", {"noise": torch.zeros(16)[::2]}),
        (
            r"row_index must be contiguous",
            {"noise": torch.zeros(2, 8), "row_index": torch.zeros(6, dtype=torch.int32)[::2]},
        ),
    ],
)
def test_what_the_launchers_refuse_besides(message, changed):
    args = arguments(changed)
    x, weight, noise, row_index = args[:4]
    dy, rstd = torch.zeros(x.shape), torch.zeros(x.shape[:-1])
    with pytest.raises(ValueError, match=message), interpreting():
        norm.rms_norm(*args)
    with pytest.raises(ValueError, match=message), interpreting():
        norm.rms_norm_backward(dy, x, rstd, weight, noise, row_index, 0.0)


@pytest.mark.parametrize(
    ("message", "dy", "rstd"),
    [
        (r"dy must be floats \[3, 8\], found float32 \[3, 7\]", torch.zeros(3, 7), torch.zeros(3)),
        (r"dy must be floats \[3, 8\], found int64", torch.zeros(3, 8).long(), torch.zeros(3)),
        (r"rstd must be float32 \[3\], found float32 \[2\]", torch.zeros(3, 8), torch.zeros(2)),
        (r"rstd must be float32 \[3\], found float64", torch.zeros(3, 8), torch.zeros(3).double()),
    ],
)
def test_gradients_that_do_not_fit(message, dy, rstd):
    rest = (torch.zeros(3, 8), rstd, torch.zeros(8), None, None, 0.0)
    with pytest.raises(ValueError, match=message):
        norm_cpu.rms_norm_backward_cpu(dy, *rest)
    with pytest.raises(ValueError, match=message), interpreting():
        norm.rms_norm_backward(dy, *rest)


def test_gradient_layouts_the_launcher_refuses():
    x, w = torch.zeros(3, 8), torch.zeros(8)
    with pytest.raises(ValueError, match="dy must have stride 1"), interpreting():
        norm.rms_norm_backward(torch.zeros(8, 3).t(), x, torch.zeros(3), w, None, None, 0.0)
    with pytest.raises(ValueError, match="rstd must be contiguous"), interpreting():
        norm.rms_norm_backward(x, x, torch.zeros(6)[::2], w, None, None, 0.0)
    with pytest.raises(ValueError, match="dy must be bfloat16 or .*, found"), interpreting():
        norm.rms_norm_backward(x.double(), x, torch.zeros(3), w, None, None, 0.0)


def test_launchers_refuse_cpu_tensors():
    with pytest.raises(ValueError, match="x must be on a CUDA device"):
        norm.rms_norm(*arguments({}))
    x = torch.zeros(3, 8)
    with pytest.raises(ValueError, match="x must be on a CUDA device"):
        norm.rms_norm_backward(x, x, torch.zeros(3), torch.zeros(8), None, None, 0.0)
