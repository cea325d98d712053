"""What tests of the zoo share: our model beside PyTorch's with the same values, and beside itself on other ranks.

    from zoo import Tiny, like_torch, same_on_ranks, torchvision

    def test_resnet18_is_torchvision_s():
        theirs = torchvision().models.resnet18(num_classes=4)
        like_torch(MODELS["resnet18"](classes=4), theirs, images(4, 3, 48, 48))

    def test_it_is_the_same_on_ranks():                # in test_on_ranks.py: one mpirun for several models
        same_on_ranks(Tiny("resnet18", {"classes": 4}, (3, 48, 48), classes=4), Tiny("vgg11", ...))

`like_torch` copies theirs into ours: by the order of parameters and of buffers where every pair has equal shapes, else by
`names`, our name -> theirs (or None for one that they do not have), or a list of (pattern, replacement) for `re.sub`. It
compares the output, every gradient and the running statistics, in eval and in training mode. Dropout and stochastic depth are
off on both sides.

`same_on_ranks` trains two steps on 1 rank, with recomputed blocks, on pp = 2 and on dp = 2, and the same in layout mode (`modes`:
in one of both alone); losses are equal to 1e-5, recompute and layout mode to the bit. Batch norms see a micro-batch, so dp = 2
has those of one rank. With `tp`, losses on tp = 2 are compared as well, and that of a step on one rank which goes on from their
checkpoint; layout mode refuses that mesh.

torchvision: its wheel for torch 2.13.0 (0.28.0) is made for CUDA, and its compiled operators do not load beside torch's CPU
wheel. Its models need none of them: `torchvision()` declares the two that its import asks for. Install it with

    pip install --no-deps torchvision==0.28.0          # without --no-deps pip replaces a CPU wheel of torch by one for CUDA
    pip install transformers                           # leaves torch alone

`transformers()` comes after the same declaration, since it imports torchvision where that is installed.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from launch import mpirun

from mpitrain import nn
from mpitrain.autograd import Tensor

PROGRAM = Path(__file__).with_name("zoo_program.py")
FORWARD, GRADIENTS = 1e-4, 1e-3                     # largest differences, relative to the largest number of the array
Changes: TypeAlias = Mapping[str, Callable[[Any], Any]]     # our name, a pattern -> what is done with their array


def images(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tokens(vocabulary: int, *shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, vocabulary, shape)


@cache
def declared() -> Any:
    """torch, with the operators declared that `import torchvision` describes; skips the test where there is no torch."""
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch==2.13.0")
    torch.set_num_threads(1)                        # others would turn round and round beside the other tests
    library = torch.library.Library("torchvision", "FRAGMENT")
    for signature in ("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
                      "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"):
        library.define(signature)
    return torch, library                           # the operators live as long as the library


def torchvision() -> Any:
    """torchvision with its models; skips the test where it is missing."""
    declared()
    return _imported("torchvision", "pip install --no-deps torchvision==0.28.0")


def transformers() -> Any:
    """Hugging Face's transformers; skips the test where it is missing."""
    declared()
    return _imported("transformers", "pip install transformers")


def _imported(name: str, how: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"needs {name}: {how}")


def copy_values(theirs: Any, ours: nn.Module, names: Any = None, change: Changes | None = None) -> dict[str, str]:
    """Copies the values of a torch module into our initialised model; our names -> theirs.

    `change`: what is done with some of their arrays, by our names (a pattern of `re.fullmatch`), such as ``np.transpose``.
    """
    state = {name: value.detach().numpy() for name, value in _leaves(theirs).items()}
    own = {name: leaf.shape for name, leaf in (*ours.named_parameters(), *ours.named_buffers())}
    pairs = _by_order(theirs, ours) if names is None else _by_name(own, names)
    new = dict(ours.state_dict())
    for mine, other in pairs.items():
        assert other in state, f"{mine} would be {other}, which is not among theirs: {sorted(state)}"
        value = state[other]
        for pattern, function in (change or {}).items():
            value = function(value) if re.fullmatch(pattern, mine) else value
        assert value.shape == own[mine], f"{mine} has the shape {own[mine]}, their {other} {value.shape}"
        new[mine] = value
    unused = set(state) - set(pairs.values())
    assert not unused, f"these of theirs are nobody's of ours: {sorted(unused)}"
    ours.load_state_dict(new)
    return pairs


def _leaves(theirs: Any) -> dict[str, Any]:
    """Parameters, each once, and buffers of floating-point numbers: no counters, no tables of positions."""
    return {**dict(theirs.named_parameters()),
            **{name: value for name, value in theirs.named_buffers() if value.is_floating_point() and _is_saved(theirs, name)}}


def _is_saved(theirs: Any, name: str) -> bool:
    return name in theirs.state_dict()


def _by_order(theirs: Any, ours: nn.Module) -> dict[str, str]:
    leaves = _leaves(theirs)
    parameters = {name for name, _ in theirs.named_parameters()}
    others = [name for name in leaves if name in parameters], [name for name in leaves if name not in parameters]
    pairs: dict[str, str] = {}
    for mine, other in zip(([n for n, _ in ours.named_parameters()], [n for n, _ in ours.named_buffers()]), others):
        assert len(mine) == len(other), f"{len(mine)} of ours, {len(other)} of theirs: {mine} {other}"
        pairs.update(zip(mine, other))
    return pairs


def _by_name(own: Mapping[str, Any], names: Any) -> dict[str, str]:
    def renamed(name: str) -> str | None:
        if callable(names):
            return names(name)
        for pattern, replacement in names:
            name = re.sub(pattern, replacement, name)
        return name
    return {name: other for name in own if (other := renamed(name)) is not None}


def like_torch(ours: nn.Module, theirs: Any, *x: Any, names: Any = None, change: Changes | None = None,
               output: Callable[[Any], Any] = lambda y: y, call: Callable[[Any, list[Any]], Any] | None = None,
               dtype: str = "float32", modes: Sequence[str] = ("eval", "train"), forward: float = FORWARD,
               gradients: float | None = GRADIENTS, seed: int = 0) -> None:
    """Asserts that our model computes what a torch module does with random values, forward and backward.

    `output` takes the tensor out of what theirs returns, `call(theirs, inputs)` calls it otherwise than with the inputs in
    order. Gradients, also those of floating-point inputs, are those of the sum of the outputs times fixed random numbers; one
    that is 0 but for rounding (a bias before a batch norm) is compared with the largest of all. float64 shows equality where
    ReLUs near 0 would flip. With `gradients` None there is no backward pass.
    """
    torch, _ = declared()
    torch.manual_seed(seed)
    theirs = _randomised(theirs, torch).to(getattr(torch, dtype))
    ours.initialize(seed, dtype)
    pairs = copy_values(theirs, ours, names, change)
    _without_noise(theirs, ours, torch)
    for mode in modes:
        getattr(ours, mode)()
        getattr(theirs, mode)()
        given = [np.asarray(a, dtype if np.asarray(a).dtype.kind == "f" else np.int64) for a in x]
        mine = [Tensor(a.copy(), requires_grad=a.dtype.kind == "f") for a in given]
        other = [torch.from_numpy(a.copy()).requires_grad_(a.dtype.kind == "f") for a in given]
        y = ours(*mine)
        wanted = output(call(theirs, other) if call else theirs(*other))
        _near(y.array, wanted.detach().numpy(), forward, f"the output in {mode} mode")
        weights = np.random.default_rng(1).standard_normal(y.shape).astype(dtype)
        theirs.zero_grad()
        for p in ours.parameters():
            p.grad = None
        if gradients is not None:
            y.backward(weights)
            wanted.backward(torch.from_numpy(weights))
            floor = _same_gradients(ours, theirs, pairs, change or {}, gradients, mode)
            for i, (a, b) in enumerate(zip(mine, other)):
                if b.grad is not None:
                    _near(a.grad, b.grad.numpy(), gradients, f"the gradient of input {i} in {mode} mode", floor)
        leaves = _leaves(theirs)
        for name, buffer in ours.named_buffers():
            if name in pairs:
                _near(buffer.data, leaves[pairs[name]].detach().numpy(), forward, f"{name} after a pass in {mode} mode")


def _same_gradients(ours: nn.Module, theirs: Any, pairs: Mapping[str, str], change: Changes, bar: float, mode: str) -> float:
    wanted = {name: p.grad.numpy() for name, p in theirs.named_parameters() if p.grad is not None}
    floor = 1e-3 * max(np.abs(grad).max() for grad in wanted.values())
    for name, p in ours.named_parameters():
        if name in pairs and pairs[name] in wanted:
            grad = wanted[pairs[name]]
            for pattern, function in change.items():
                grad = function(grad) if re.fullmatch(pattern, name) else grad
            assert p.grad is not None, f"no gradient of {name} in {mode} mode"
            _near(p.grad, grad, bar, f"the gradient of {name} in {mode} mode", floor)
    return floor


def _near(found: Any, wanted: Any, bar: float, what: str, floor: float = 0.0) -> None:
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.shape == wanted.shape, f"{what}: shape {found.shape}, theirs {wanted.shape}"
    scale = max(float(np.abs(wanted).max(initial=0)), floor, 1e-30)
    apart = float(np.abs(found - wanted).max(initial=0)) / scale
    assert apart <= bar, f"{what}: {apart:.3g} from theirs, relative to {scale:.3g}"


def _randomised(theirs: Any, torch: Any) -> Any:
    """Values under which every part counts: norms that scale and shift, and running statistics that are not 0 and 1."""
    with torch.no_grad():
        for p in theirs.parameters():
            if p.dim() <= 1:
                p.add_(0.1 * torch.randn_like(p))
        for name, b in theirs.named_buffers():
            if name.endswith("running_mean"):
                b.copy_(0.1 * torch.randn_like(b))
            elif name.endswith("running_var"):
                b.copy_(1 + 0.2 * torch.rand_like(b))
    return theirs


def _without_noise(theirs: Any, ours: nn.Module, torch: Any) -> None:
    for module in theirs.modules():
        if "Dropout" in type(module).__name__ or type(module).__name__ == "StochasticDepth":
            module.p = 0.0
    for mine in ours.modules():
        if hasattr(mine, "p") and isinstance(mine.p, float):
            mine.p = 0.0


@dataclass(frozen=True)
class Tiny:
    """A tiny variant of a registered model, and samples of the shape `x`: of floats, or of token numbers below `tokens`.

    Targets are classes, or with `target` of that shape: floats, or token numbers below `classes` where `kind` is "tokens".
    `tp`: layers are also cut over 2 ranks by the model's plan.
    """

    model: str
    arguments: Mapping[str, Any]
    x: tuple[int, ...]
    classes: int = 4
    tokens: int = 0
    target: tuple[int, ...] | None = None
    kind: str = "classes"
    loss: str = "cross_entropy"
    batch: int = 8
    lr: float = 0.01
    tp: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)       # further keys of the configuration, such as clip_norm


def same_on_ranks(*cases: Tiny, modes: Sequence[str] = ("run", "layout"), timeout: float = 150) -> None:
    """One job of 2 ranks for all cases; see above."""
    result = mpirun(2, PROGRAM, json.dumps([asdict(case) for case in cases]), ",".join(modes), timeout=timeout)
    assert result.rc == 0, result.out + result.err
    done = [line.removeprefix("same: ") for line in result.out.splitlines() if line.startswith("same: ")]
    assert done == [case.model for case in cases], result.out
