"""What PyTorch's users type and is not here, and what to write instead; read when a name or an argument is not found.

docs/from_pytorch.md has the commonest with what to write; a test runs its lines, and looks up what the hints name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from mpitrain.errors import nearest

DRAWN = ("random numbers inside a model are functions of the seed, the step, the sample and the layer's name, the same on any "
         "number of ranks (nn.Dropout); first values come from nn.init, and data from numpy.random.default_rng(seed)")
DEVICE = "a model and all it computes are on one device, the one given to initialize() or train.device"
HALF = 'there is no float16; products in bfloat16 are a setting of the run, train.precision = "bfloat16"'
HANDLE = "hooks are before_forward, after_forward, before_backward and after_backward"


def each(names: str, hint: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), hint)


ARGUMENTS = {
    "alpha": "write the product: x + alpha * y",
    "device": DEVICE,
    "dtype": "convert what goes in or comes out: x.to(dtype)",
    "inplace": "no operation changes a tensor; leave it out",
    "out": "no operation writes into an array; write y = ops.NAME(...)",
    "requires_grad": "x.requires_grad_() makes a leaf of a tensor",
    "reduce": 'reduction="none"',
    "rounding_mode": "ops.floor_divide and ops.trunc_divide",
    "size_average": 'reduction="mean" or "sum"',
    "sparse_grad": "gradients are dense; leave it out",
    "training": "the model's train() and eval() decide; layers such as nn.Dropout ask them",
    "unbiased": "unbiased=False is correction=0",
}
FAN = 'PyTorch\'s mode="fan_out" is fan="out", and its a is the slope of a leaky ReLU: 0 for nonlinearity="relu"'
OPERATIONS = {
    **each("kaiming_normal kaiming_uniform", FAN),
    "truncated_normal": "PyTorch's a and b are low and high, and std comes before mean",
    "normal": "std comes before mean",
    "uniform": "numbers lie in [-bound, bound); PyTorch's a=0, b=1 is nowhere an initial value",
    "calculate_gain": "PyTorch's param is the slope",
    "Parameter": "nn.Parameter(shape, init) describes it, for instance with nn.init.zeros; model.initialize() gives the values, "
                 "and model.load_state_dict() those of an array",
    "Buffer": "nn.Buffer(shape, init) describes it; model.initialize() gives the values",
    "cross_entropy": "with weight or reduction, write ops.nll_loss(ops.log_softmax(x, 1), labels, weight=..., reduction=...), "
                     "or nn.CrossEntropyLoss",
    "dropout": "masks are named: ops.dropout(x, p, layer=self.path) inside a module, or nn.Dropout(p)",
    "scaled_dot_product_attention": "weights are dropped by nn.MultiHeadAttention",
    "std": "keepdim and correction are given by name",
    "unfold": "this is Tensor.unfold (windows along a dim); nn.functional.unfold (patches as columns) is ops.im2col",
    "var": "keepdim and correction are given by name",
}
OWN = "the array is x.array, and a Function of your own has a derivative: docs/extending.md"
HERE = "operations do not change tensors in place: "
OPS = {
    **each("istft stft", "ops.rfft of the windows x.unfold(-1, length, hop) * window"),
    **each("eig eigvals", "ops.eigh is of symmetric matrices"),
    **each("lstsq", "ops.pinv(a) @ b"),
    **each("clamp_max clamp_min", "x.clamp(min=...), x.clamp(max=...)"),
    **each("dist", "ops.norm(x - y, p), and ops.cdist of all pairs"),
    "pinverse": "ops.pinv(x, rtol=...)",
    "float_power": 'x.to("float64") ** y',
    "mode": "ops.unique(x, return_counts=True)",
    "renorm": "x * (limit / ops.norm(x, dim=1, keepdim=True)).clamp(max=1)",
    "take_along": "ops.take_along_dim(x, index, dim)",
    **each("bernoulli multinomial normal poisson rand rand_like randint randint_like randn randn_like randperm", DRAWN),
    "as_strided": "x.unfold(dim, size, step) has windows along a dim, ops.im2col patches of images",
    **each("bartlett_window blackman_window hamming_window hann_window kaiser_window",
           "ops.tensor(np.hanning(n + 1)[:-1]) has n numbers; NumPy has bartlett, blackman, hamming and kaiser, too"),
    **each("bessel_j0 bessel_j1 gammainc gammaincc i0 i0e i1 i1e",
           "scipy.special.NAME(x.numpy()) has the values, without a gradient"),
    "eig": "ops.eigh is of symmetric matrices, with a gradient; np.linalg.eig(x.numpy()) of others has none",
    "eigvals": "ops.eigvalsh is of symmetric matrices, with a gradient; np.linalg.eigvals(x.numpy()) of others has none",
    "embedding_bag": "nn.EmbeddingBag is the layer",
    "gumbel_softmax": f"ops.softmax((x + noise) / tau, -1), with noise = rng.gumbel(size=x.shape); {DRAWN}",
    **each("histc histogram", "np.histogram(x.numpy(), bins) counts, which has no gradient; ops.bincount counts integers"),
    "istft": "ops.irfft of each window, added where they overlap by ops.fold",
    "lstsq": "ops.matmul(ops.pinv(a), b), or ops.solve of a.T @ a and a.T @ b",
    **each("lu lu_factor lu_solve", "ops.solve, ops.inv and ops.det use LU; scipy.linalg.lu(x.numpy()) has the factors"),
    "stft": "ops.rfft(x.unfold(-1, n, hop) * window), a spectrum in each row",
    "vmap": "operations take batches in leading dims (ops.matmul, ops.solve); ops.stack([f(x) for x in rows]) is for any f",
    "empty": "ops.zeros",
    "empty_like": "ops.zeros_like",
    "from_numpy": "Tensor(array), which shares the memory",
    "as_tensor": "Tensor(array), which shares the memory",
    "instance_norm": "nn.InstanceNorm2d is the layer",
    "local_response_norm": "nn.LocalResponseNorm is the layer",
    "logsigmoid": "ops.log_sigmoid",
    "manual_seed": "model.initialize(seed) has the seed",
    "no_grad": "mpitrain.no_grad",
    "upsample": "ops.interpolate",
}
TENSOR = {
    **each("cpu cuda device get_device is_cuda is_cpu pin_memory",
           f"{DEVICE}; x.numpy() has the values on the host"),
    **each("bfloat16 half chalf", HALF),
    **each("is_sparse sparse_dim to_dense to_sparse", "all arrays are dense"),
    **each("data_ptr storage untyped_storage", "x.array is the memory"),
    **each("clamp_max_ clamp_min_", f"{HERE}x = x.clamp(min=...), x = x.clamp(max=...)"),
    **each("resize resize_as resize_ resize_as_", f"{HERE}x.reshape, or ops.pad for another size"),
    **each("apply_ map_ map2_", f"{HERE}{OWN}"),
    **each("as_strided as_strided_", "x.unfold, x.diagonal, x.expand and x[...] are views"),
    **each("sparse_resize_ sparse_resize_and_clear_ resize_as_sparse_", "all arrays are dense"),
    "H": "x.mH",
    "conj_physical_": f"{HERE}x = x.conj()",
    "detach_": f"{HERE}x = x.detach()",
    "element_size": "x.array.itemsize",
    "fill_diagonal_": f"{HERE}x = x.diagonal_scatter(values)",
    "float_power_": f'{HERE}x = x.to("float64") ** y',
    "is_contiguous": "x.array.flags.c_contiguous",
    "is_nonzero": "bool(x)",
    "is_same_size": "x.shape == y.shape",
    "itemsize": "x.array.itemsize",
    "nbytes": "x.array.nbytes",
    "put_": f"{HERE}x = x.index_put(indices, values)",
    "renorm_": f"{HERE}x = x * (limit / x.norm(dim=1, keepdim=True)).clamp(max=1)",
    "set_": f"{HERE}x = Tensor(array)",
    "share_memory_": "ranks exchange arrays in memory that they share by themselves",
    **each("split_with_sizes unsafe_split unsafe_split_with_sizes", "x.split(sizes)"),
    "svd": "ops.svd(x), which is torch.linalg.svd: V comes transposed, and u and v' are square by default",
    **each("i0_ igamma_ igammac_ nextafter_", f"not here; {OWN}"),
    **each("indices values", "extrema along a dim with places are x.max(dim), x.min(dim), ops.max_with_index(x, dim)"),
    "grad_fn": "x.node",
    "is_floating_point": 'x.dtype.kind == "f"',
    "is_leaf": "x.node is None",
    "nelement": "x.numel()",
    "ndimension": "x.ndim",
    "new_empty": "x.new_zeros",
    "new_tensor": "ops.tensor(values)",
    "register_hook": "gradients of results are given by autograd.grad(loss, [x]); hooks of modules are nn.Module.before_backward",
    "retain_grad": "gradients of results are given by autograd.grad(loss, [x])",
    "stride": "x.array.strides, in bytes",
    "type": "x.dtype, and x.to(dtype)",
}
MODULE = {
    **each("cpu cuda to to_empty", 'model.initialize(seed, dtype="float32", device=...) gives a model its memory'),
    **each("double float", 'model.initialize(seed, dtype="float64") gives a model its memory'),
    **each("bfloat16 half", HALF),
    "add_module": "setattr(self, name, module)",
    "buffers": "dict(model.named_buffers()).values()",
    "compile": "nothing is compiled; leave it out",
    "get_parameter": "dict(model.named_parameters())[name]",
    "get_submodule": "dict(model.named_modules())[name]",
    **each("register_backward_hook register_forward_hook register_forward_pre_hook register_full_backward_hook "
           "register_full_backward_pre_hook", HANDLE),
    "register_buffer": "self.name = nn.Buffer(shape, nn.init.zeros)",
    "register_module": "setattr(self, name, module)",
    "register_parameter": "self.name = nn.Parameter(shape, nn.init.zeros)",
}
NN = {
    "AdaptiveLogSoftmaxWithLoss": "nn.CrossEntropyLoss of a linear layer; there is no softmax by clusters",
    "CrossMapLRN2d": "nn.LocalResponseNorm",
    "DataParallel": "mpirun -n N starts the ranks: docs/running.md",
    "MultiheadAttention": "nn.MultiHeadAttention",
    "functional": "its functions are mpitrain.ops: from mpitrain import ops as F",
    "utils": "gradients are clipped by optimizer.clip_norm, and weights reparametrised by nn.weight_norm",
}


OPTIM = {"SparseAdam": "gradients are dense: optim.Adam"}


class UnknownName(AttributeError):
    """`what` has no attribute `name`. What to write instead is looked for where somebody reads the message: `hasattr` does not.

    It is what `words` say of PyTorch's names, or the operation of that name, or else the nearest of the `known` names.
    """

    def __init__(self, what: str, name: str, words: dict[str, str], known: Callable[[], Iterable[str]] = tuple):
        super().__init__(what, name)
        self.words, self.known = words, known

    def __str__(self) -> str:
        what, name = self.args
        hint = hint_of_op(name)
        if name in self.words:
            hint = f"; in place of PyTorch's {name}: {self.words[name].replace('NAME', name)}"
        near = "" if hint else nearest(name, [one for one in self.known() if not one.startswith("_")])
        return f"{what} has no attribute {name!r}{hint}{near if '?' in near else ''}"


def hint_of_op(name: str) -> str:
    """`` (mpitrain.ops has it)`` where operations are read already and one has this name."""
    ops: Any = sys.modules.get(__package__ or "")
    return f"; it is mpitrain.ops.{name}" if ops is not None and not name.startswith("_") and name in dir(ops) else ""
