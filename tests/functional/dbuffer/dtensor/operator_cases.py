"""Calls of PyTorch's functions on plain and sharded tensors, and the comparison of their results."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

from dbuffer import BufferPlacement, DBuffer, Flat, Row
from dbuffer import Replicate as Whole
from dbuffer.dtensor.elementwise_ops import run_by_rows
from dbuffer.dtensor.op_table import operator_of

# Rows that no number of ranks divides, one row, one element, 3-D, an empty tensor, and more rows than one shard holds.
SHAPES = [(7, 3), (1,), (1, 7), (3, 2, 5), (0, 4), (11,), (3, 1), (2, 5, 3), (13, 4)]
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[BufferPlacement, ...]]] = {
    "one rank": ((1,), (Flat(),)), "two ranks": ((2,), (Flat(),)), "three ranks": ((3,), (Flat(),)),
    "four ranks": ((4,), (Flat(),)), "hsdp": ((2, 2), (Whole(), Flat())), "hfsdp": ((2, 2), (Flat(), Flat())),
    "replicated": ((2,), (Whole(),)), "inside slices": ((3,), (Flat(),)),
    "inside slices, hfsdp": ((2, 2), (Flat(), Flat())),
}  # fmt: skip
Function = Callable[[torch.Tensor, torch.Tensor], object]


def num_ranks(layout: str) -> int:
    return math.prod(LAYOUTS[layout][0])


def values(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return one tensor per shape; half of the elements are negative."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def make_mesh(layout: str) -> DeviceMesh:
    sizes, _ = LAYOUTS[layout]
    return init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner")[-len(sizes) :])


def sharded(layout: str, tensors: list[torch.Tensor], mesh: DeviceMesh) -> list[Any]:
    """Return tensors sharded by one flat buffer, each a FlatDTensor."""
    granularity = Row() if "inside slices" in layout else None
    buffer = DBuffer.distribute_tensors(tensors, mesh, list(LAYOUTS[layout][1]), granularity=granularity)
    return [buffer.get_dtensor(index) for index in range(len(tensors))]


def in_other_rows(tensor: torch.Tensor, like: DTensor, kind: str) -> torch.Tensor:
    """Return the same values as a DTensor with other placements on the same mesh."""
    mesh = like.device_mesh
    if kind == "cut by torch":
        placements = [Replicate() if type(p) is Replicate else Shard(0) for p in like.placements]
        return distribute_tensor(tensor, mesh, placements)
    if kind == "replicated":
        return distribute_tensor(tensor, mesh, [Replicate() for _ in like.placements])
    flat: list[BufferPlacement] = [Whole() if type(p) is Replicate else Flat() for p in like.placements]
    before = [torch.zeros(5), tensor, torch.zeros(17, 2)]
    return DBuffer.distribute_tensors(before, mesh, flat).get_dtensor(1)


OTHER_ROWS = ("cut by torch", "replicated", "another buffer")


def whole(result: object) -> object:
    """Return a result with every DTensor whole; every rank calls it."""
    if isinstance(result, DTensor):
        return result.full_tensor()
    if isinstance(result, (tuple, list)):
        return [whole(item) for item in result]
    return result


def agree(found: object, wanted: object, tolerance: float = 0.0) -> bool:
    """Compare two results: structure, shapes, dtypes and values."""
    if isinstance(wanted, torch.Tensor):
        if not isinstance(found, torch.Tensor) or found.shape != wanted.shape or found.dtype != wanted.dtype:
            return False
        return torch.allclose(found.detach(), wanted.detach(), rtol=tolerance, atol=tolerance, equal_nan=True)
    if isinstance(wanted, (tuple, list)):
        assert isinstance(found, (tuple, list))
        return len(found) == len(wanted) and all(agree(a, b, tolerance) for a, b in zip(found, wanted, strict=True))
    if isinstance(wanted, float):
        return isinstance(found, float) and math.isclose(found, wanted, rel_tol=tolerance or 1e-9)
    return found == wanted


def outcome(function: Function, x: torch.Tensor, y: torch.Tensor) -> tuple[object, str]:
    """Call a function from a fixed seed. Return its result and both arguments, or the class of its error."""
    torch.manual_seed(1)
    try:
        with torch.no_grad():
            return [function(x, y), x, y], ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def differences(layout: str, table: str, dtype: torch.dtype, tolerance: float) -> list[str]:
    """Return differences between sharded and plain tensors in results, changed arguments and random state."""
    found, mesh = [], make_mesh(layout)
    for name, function in TABLES[table].items():
        plain = zip(values(1, dtype), values(2, dtype), strict=True)
        faces = zip(sharded(layout, values(1, dtype), mesh), sharded(layout, values(2, dtype), mesh), strict=True)
        is_hollow = True
        for shape, operands, own in zip(SHAPES, plain, faces, strict=True):
            wanted, wanted_error = outcome(function, *operands)
            is_hollow = is_hollow and bool(wanted_error)
            state = torch.get_rng_state()
            result, error = outcome(function, *own)
            if bool(error) != bool(wanted_error):
                found.append(f"{name} of {shape}: {error or 'no error'}, wanted {wanted_error or 'none'}")
            elif not error and not agree(whole(result), wanted, tolerance):
                found.append(f"{name} of {shape}: {whole(result)}, wanted {wanted}")
            elif not error and not torch.equal(torch.get_rng_state(), state):
                found.append(f"{name} of {shape} leaves the generator in another state")
        # Linear algebra has no bf16.
        if is_hollow and dtype is torch.float32:
            found.append(f"{name} fails on plain tensors of every shape: {wanted_error}")
    return found


def _raises(function: Callable[[], object]) -> bool:
    try:
        function()
    except RuntimeError:
        return True
    return False


def _write_through(x: torch.Tensor, y: torch.Tensor) -> object:
    x[0].fill_(3.0)
    x[-1:].mul_(2.0)
    x.view(-1)[: x.numel() // 2].add_(1.0)
    return x.sum()


def _views_see_changes(x: torch.Tensor, y: torch.Tensor) -> object:
    first, flat, rows, column = x[0], x.flatten(), x[1:], x[..., 0]
    x.mul_(2.0)
    x[-1] = 5.0
    return [first + 0, flat * 1, rows * 1, column * 1]


WHOLE: dict[str, Function] = {
    "matmul": lambda x, y: x @ y.T if x.ndim == 2 else x.flatten() @ y.flatten(),
    "transpose": lambda x, y: x.transpose(0, -1).contiguous() + y.transpose(0, -1),
    "T in place": lambda x, y: x.T.div_(2.0) if x.ndim == 2 else x,
    "flatten": lambda x, y: torch.cat([x.flatten(), y.view(-1), x.reshape(-1)]),
    "cat": lambda x, y: torch.cat([x, y]),
    "sort": lambda x, y: x.sort(0),
    "one row": lambda x, y: x[0] * 2,
    "every other row": lambda x, y: x[::2] * 1,
    "mask": lambda x, y: x[x > 0],
    "masked write": lambda x, y: x.masked_fill_(y > 0, 7.0),
    "mask assignment": lambda x, y: x.__setitem__(y > 0, 7.0),
    "row assignment": lambda x, y: x.__setitem__(1, 7.0),
    "rows assignment": lambda x, y: x.__setitem__(slice(1, None), y[1:]),
    "index_fill_": lambda x, y: x.index_fill_(0, (y.abs().flatten()[:1] * 0).long(), 4.0),
    "last column": lambda x, y: x[..., -1] + 1,
    "column in place": lambda x, y: x[..., 0].zero_(),
    "unsqueeze": lambda x, y: x.unsqueeze(1) + y.unsqueeze(-1)[..., 0].unsqueeze(1),
    "view of other rows": lambda x, y: x.view(-1, 1).mul_(3.0),
    "permute trailing": lambda x, y: x.permute(0, *range(x.ndim - 1, 0, -1)) * 2,
    "permute trailing in place": lambda x, y: x.permute(0, *range(x.ndim - 1, 0, -1)).mul_(2),
    "split in place": lambda x, y: [part.add_(index) for index, part in enumerate(x.split(2))],
    "unbind": lambda x, y: [part * 1 for part in x.unbind(0)],
    "iteration": lambda x, y: [part * 1 for part in x],
    "writing through views": _write_through,
    "views after changes": _views_see_changes,
    "broadcast column": lambda x, y: x * y.sum(-1, keepdim=True),
    "softmax rows": lambda x, y: x.softmax(-1),
    "prod": lambda x, y: x.prod(),
    "equal": lambda x, y: (torch.equal(x, y), torch.equal(x, x.clone()), torch.allclose(x, x * 1)),
    "item": lambda x, y: x.sum().item() if x.numel() == 1 else x[(0,) * x.ndim].item(),
    "tolist": lambda x, y: x.tolist(),
    "bool": lambda x, y: bool(x.sum() > 0),
    "qr": lambda x, y: torch.linalg.qr(x),
    "out": lambda x, y: torch.add(y, 1, out=x),
    "where write": lambda x, y: x.copy_(torch.where(x > y, x, y)),
    "tril_": lambda x, y: x.tril_(),
    "new_empty": lambda x, y: x.new_empty((2, 3)).fill_(1) + x.new_zeros(2, 3) + x.new_ones((2, 3)),
    "new_full": lambda x, y: x.new_full((5,), 3.0) * x.new_tensor([1.0, 2, 3, 4, 5]),
    "new of same shape": lambda x, y: x.new_zeros(x.shape) + x.new_full(x.shape, 2) + x.new_ones(*x.shape),
    "diagonal": lambda x, y: x.diagonal().fill_(9.0),
    "relu in place of a view": lambda x, y: functional.relu(x[::2], inplace=True),
    "to like": lambda x, y: x.to(y.double()),
    "type_as": lambda x, y: x.type_as(y.bfloat16()),
    "data": lambda x, y: x.data.mul_(2),
    "set data": lambda x, y: setattr(x, "data", y * 2),
    "as_strided": lambda x, y: x.as_strided((2,), (1,), 0).mul_(3),
    "fill diagonal": lambda x, y: x.fill_diagonal_(2.0),
}

REDUCTIONS: dict[str, Function] = {
    "sum": lambda x, y: x.sum(),
    "sum of rows": lambda x, y: x.sum(0),
    "sum in rows": lambda x, y: x.sum(-1, keepdim=True),
    "sum as double": lambda x, y: x.sum(dtype=torch.float64),
    "mean": lambda x, y: x.mean(),
    "mean of rows": lambda x, y: x.mean(0, keepdim=True),
    "amax": lambda x, y: x.amax(),
    "amin of rows": lambda x, y: x.amin(0),
    "max": lambda x, y: x.max(),
    "max of rows": lambda x, y: x.max(0),
    "max in rows": lambda x, y: x.max(-1),
    "min": lambda x, y: x.min(),
    "max of two": lambda x, y: torch.max(x, y),
    "largest, absolute": lambda x, y: x.abs().max(),
    "all": lambda x, y: (x > -9).all(),
    "any and all of bytes": lambda x, y: ((x > 0).byte().any(), (x > 0).byte().all(dim=0)),
    "all of rows": lambda x, y: (x > -1).all(0),
    "isfinite": lambda x, y: torch.isfinite(x).all(),
    "nan": lambda x, y: x.sqrt().amax(),
    "norm": lambda x, y: x.norm(),
    "norm of rows": lambda x, y: torch.norm(x, dim=0),
    "1-norm": lambda x, y: x.norm(1),
    "inf-norm": lambda x, y: torch.linalg.vector_norm(x, float("inf")),
    "0-norm": lambda x, y: torch.linalg.vector_norm(x, 0),
    "-inf-norm": lambda x, y: torch.linalg.vector_norm(x, -float("inf")),
    "3-norm": lambda x, y: torch.linalg.vector_norm(x, 3, dtype=torch.float64),
    "frobenius": lambda x, y: torch.linalg.norm(x),
    "foreach norm": lambda x, y: torch._foreach_norm([x, y]),
    "foreach inf-norm": lambda x, y: torch._foreach_norm([x, y], float("inf")),
    "foreach 1-norm": lambda x, y: torch._foreach_norm([x, y], 1),
    "logsumexp": lambda x, y: x.logsumexp(0),
}

RANDOM: dict[str, Function] = {
    "uniform_": lambda x, y: x.uniform_(-1, 2),
    "normal_": lambda x, y: x.normal_(1, 3),
    "bernoulli_": lambda x, y: x.bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda x, y: x.bernoulli_(y.sigmoid()),
    "normal_ with a generator": lambda x, y: x.normal_(generator=torch.Generator().manual_seed(5)),
    "normal_ twice": lambda x, y: (x.normal_(), y.normal_()),
    "normal_ through a view": lambda x, y: x.view(-1).normal_(),
    "normal_ of a row": lambda x, y: x[0].normal_(),
    "rand_like": lambda x, y: torch.rand_like(x),
    "randn_like": lambda x, y: torch.randn_like(x, dtype=torch.float64) + torch.randn_like(y[1:]),
    "randint_like": lambda x, y: torch.randint_like(x, 10),
    "bernoulli": lambda x, y: torch.bernoulli(x.sigmoid()),
    "dropout": lambda x, y: functional.dropout(x, 0.5),
    "dropout in place": lambda x, y: functional.dropout(x, 0.5, inplace=True),
    "torch.normal": lambda x, y: torch.normal(x, 1.0),
    "init.normal_": lambda x, y: torch.nn.init.normal_(x, std=0.1),
    "init.trunc_normal_": lambda x, y: torch.nn.init.trunc_normal_(x),
    "init.constant_": lambda x, y: torch.nn.init.constant_(x, 3.0),
    "init.eye_": lambda x, y: torch.nn.init.eye_(x),
    "init.dirac_": lambda x, y: torch.nn.init.dirac_(x),
    "init.xavier_uniform_": lambda x, y: torch.nn.init.xavier_uniform_(x),
    "init.kaiming_uniform_": lambda x, y: torch.nn.init.kaiming_uniform_(x, a=5**0.5) if x.numel() else x,
    "init.orthogonal_": lambda x, y: torch.nn.init.orthogonal_(x),
}
_ACTIVATIONS = """celu elu gelu hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 selu silu softplus
softshrink softsign tanhshrink""".split()
# Operators whose arguments cannot be guessed; _OPERATORS has them.
_SPECIAL = frozenset("float_power_ where masked_fill masked_fill_ record_stream alias".split())
_CASTS = "float double half bfloat16 int long short bool cpu detach zero_ copy_".split()
_OPERATORS: dict[str, Function] = {
    "real": lambda x, y: x.real * 2,
    "p + q": lambda x, y: x + y,
    "2 - p": lambda x, y: 2 - x,
    "2 / p": lambda x, y: 2 / x,
    "p % 2": lambda x, y: x % 2,
    "-abs(p)": lambda x, y: -abs(x),
    "p == q": lambda x, y: x == y,
    "(p > 0) & ~(q > 0)": lambda x, y: (x > 0) & ~(y > 0),
    "p += q": lambda x, y: x.__iadd__(y),
    "p /= q": lambda x, y: x.__itruediv__(y),
    "addcmul": lambda x, y: torch.addcmul(x, y, y, value=0.5),
    "addcdiv_": lambda x, y: x.addcdiv_(y, y.abs() + 1, value=-0.1),
    "clamp": lambda x, y: x.clamp(-0.5, 0.5) + x.clamp_min(0) + torch.clamp(x, y - 1, y + 1),
    "lerp": lambda x, y: x.lerp(y, 0.3) + torch.lerp(x, y, x.sum()),
    "lerp_": lambda x, y: x.lerp_(y, 0.999),
    "where": lambda x, y: torch.where(x > 0, x, y) + torch.where(y > 0, x, 0.0),
    "masked_fill": lambda x, y: x.masked_fill(x > y, -1.0),
    "fill_": lambda x, y: x.fill_(2.5),
    "float_power_": lambda x, y: x.double().float_power_(2),
    "fill_ with a sum": lambda x, y: x.fill_(y.sum()),
    "zeros_like": lambda x, y: torch.zeros_like(x) + torch.ones_like(y) + torch.full_like(x, 3.0),
    "empty_like": lambda x, y: torch.empty_like(x, dtype=torch.float64).copy_(y),
    "alpha": lambda x, y: x.add(y, alpha=0.5).sub_(y, alpha=2),
    "chain": lambda x, y: (x * 0.5 + 1).clone().to(torch.float64).detach().float().neg(),
    "aten": lambda x, y: torch.ops.aten.mul.Tensor(x, y) + torch.ops.aten.add_.Tensor(x, 1),
    "out of place by name": lambda x, y: torch.mul(input=x, other=y),
    "plain tensors of one element": lambda x, y: x * torch.full((1,) * x.ndim, 2.0) + torch.ones(1).to(x.dtype),
    "broadcast": lambda x, y: x * y[..., :1] + x * y.flatten()[:1] if y.numel() else x,
    "0-d plain tensor": lambda x, y: x * torch.tensor(2.0) + torch.tensor(3.0),
    "foreach": lambda x, y: torch._foreach_add(torch._foreach_mul([x, y], 0.5), [y, x]),
    "foreach in place": lambda x, y: torch._foreach_lerp_([x, y], [y * 2, x], 0.1),
    "foreach scalars": lambda x, y: torch._foreach_div([x, y], [2.0, 3.0]),
    "foreach tensor": lambda x, y: torch._foreach_mul_([x, y], torch.tensor(3.0)),
    "foreach addcmul": lambda x, y: torch._foreach_addcmul_([x], [y], [y], value=2.0),
    "foreach copy": lambda x, y: torch._foreach_copy_([x], [y]),
    "sharded scale": lambda x, y: x * y.sum() + x.mul_(y.norm()),
    "column scale": lambda x, y: x * y.amax(-1, keepdim=True) if y.numel() else x,
}


def _method(name: str) -> Function:
    """Return a call of a method with the first arguments that it takes."""

    def function(x: torch.Tensor, y: torch.Tensor) -> object:
        for left, right in ((x, y), ((x * 9).int(), (y * 9).int())):
            for arguments in ((), (right,), (2,), (right, right)):
                try:
                    result = getattr(left, name)(*arguments)
                except (TypeError, RuntimeError):
                    continue
                if result is not NotImplemented:
                    return result
        raise TypeError(name)

    return function


def _activation(name: str) -> Function:
    return lambda x, y: getattr(functional, name)(x)


def _element_wise_methods() -> list[str]:
    methods = [name for name in dir(torch.Tensor) if callable(getattr(torch.Tensor, name)) and name not in _SPECIAL]
    return [name for name in methods if operator_of(getattr(torch.Tensor, name)).run is run_by_rows]


ELEMENT_WISE: dict[str, Function] = {
    **{name: _method(name) for name in (*_element_wise_methods(), *_CASTS)},
    **{f"functional.{name}": _activation(name) for name in _ACTIVATIONS},
    **_OPERATORS,
}
# Functions that differ from others of their kind in what they write, read or return.
RARE: dict[str, Function] = {
    "where of a condition": lambda x, y: torch.where(x > 0),
    "apply_": lambda x, y: x.apply_(lambda number: number + 1),
    "apply_ of a view": lambda x, y: x.flatten().apply_(lambda number: number + 1),
    "map_": lambda x, y: x.map_(y, lambda one, other: one - other),
    "bernoulli_ of itself": lambda x, y: x.sigmoid_().bernoulli_(x),
    "bernoulli_ of its view": lambda x, y: x.sigmoid_().bernoulli_(x.view(x.shape)),
    "a view's own dtype": lambda x, y: x.view(-1).float().mul_(2),
    "a view's own device": lambda x, y: x[1:].cpu().zero_(),
    "real part in place": lambda x, y: x.real.mul_(3),
    "all of no dimensions": lambda x, y: (x.all(dim=()), x.any(dim=[])),
    "a dimension twice": lambda x, y: _raises(lambda: x.sum((0, 0))),
    "foreach power of a number": lambda x, y: torch._foreach_pow(2.0, [x, y]),
    "foreach by name": lambda x, y: (torch._foreach_exp(self=[x, y]), torch._foreach_norm(self=[x, y], ord=1.0)),
    "foreach inf-norm of NaN": lambda x, y: torch._foreach_norm([x.sqrt(), -y.sqrt()], math.inf),
    "inf-norm of NaN": lambda x, y: (x.sqrt().norm(math.inf), (-y.sqrt()).amin()),
    "foreach norm in FP64": lambda x, y: torch._foreach_norm([x * 1e30, y * 1e30], dtype=torch.float64),
    "foreach 0-norm in FP64": lambda x, y: torch._foreach_norm([x, y], 0.0, dtype=torch.float64),
}
TABLES = {"element-wise": ELEMENT_WISE, "whole": WHOLE, "reductions": REDUCTIONS, "random": RANDOM, "rare": RARE}
