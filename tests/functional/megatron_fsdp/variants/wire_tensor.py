"""A tensor subclass with FSDP2's hooks: its all-gather sends bf16 values and the number of calls on each rank."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

_KEPT = {
    torch.ops.aten.detach.default,
    torch.ops.aten.view.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.clone.default,
    torch.ops.aten.copy_.default,
    # FSDP2 makes its padded parts with these operators.
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten._to_copy.default,
}


class WireTensor(torch.Tensor):
    """Wrap one tensor; ``fsdp_pre_all_gather`` has its form with one argument."""

    inner: Any

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> WireTensor:
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), strides=inner.stride(), dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner
        self.num_asked = 0

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> WireTensor:
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it as a function without a class
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(WireTensor, lambda each: each.inner, (args, kwargs or {}))
        found = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, cls, found) if func in _KEPT else found

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        self.num_asked += 1
        asked = torch.tensor([self.num_asked], dtype=torch.int64)
        return (self.inner.bfloat16(), asked), (mesh.size(), self.num_asked)

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        values, asked = outputs
        size, count = metadata
        assert out is None or asked.tolist() == [count] * size
        if out is not None:
            # FSDP2 calls this with gradients enabled, and operators that read the parameter saved it.
            with torch.no_grad(), torch.autograd.grad_mode._unsafe_preserve_version_counter(out):
                out.copy_(values)
            return None
        return values.to(param_dtype), (values,)


class FullFormTensor(WireTensor):
    """The form with five arguments, which are recorded; an argument too few or too many is an error."""

    seen: tuple[Any, ...] = ()

    def fsdp_pre_all_gather(  # type: ignore[override]  # FSDP2 calls either form
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        type(self).seen = (tuple(outer_size), tuple(outer_stride), type(module).__name__, mp_policy.param_dtype)
        return super().fsdp_pre_all_gather(mesh)


class RankSizedTensor(WireTensor):
    """A tensor whose hook returns another size on rank 1."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        (values, asked), metadata = super().fsdp_pre_all_gather(mesh)
        return (values, asked.repeat(1 + torch.distributed.get_rank())), metadata


class ReleasingTensor(WireTensor):
    """Compute in memory of its own after a gather, and leave the gathered memory unused (PyTorch 2.15's third hook).

    Attributes:
        seen: of the last instance, the storages of the gathered tensors and of the tensor for compute.
        answer: of the third hook. keeps_values: whether the tensor for compute still lies in the gathered memory.
    """

    seen: tuple[list[torch.UntypedStorage], torch.UntypedStorage]
    answer: Any = True
    keeps_values = False

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> Any:
        return self.answer

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        found = super().fsdp_post_all_gather(outputs, metadata, param_dtype, out=out)
        if out is not None:
            return None
        whole = outputs[0] if self.keeps_values else found[0].clone()
        type(self).seen = ([each.untyped_storage() for each in outputs], whole.untyped_storage())
        return whole, (whole,)

    @classmethod
    def held(cls) -> tuple[bool, bool]:
        """Return whether the gathered tensors, and the tensor for compute, have memory now."""
        outputs, whole = cls.seen
        return any(each.nbytes() > 0 for each in outputs), whole.nbytes() > 0


class NoHookTensor(torch.Tensor):
    """A wrapper without hooks."""

    inner: Any

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> NoHookTensor:
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it as a function without a class
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(func)
