"""LoRA adapters merged into the weights that are sent; the model keeps both apart.

Every rank computes the whole product of an adapter, by the code of the adapter's own class, and adds the part that
belongs to its shard before the gather: the sum is that of peft's ``merge_and_unload``, to the bit, and nothing more
travels than without adapters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megatron_fsdp.checkpoint.model_state import canonical, unwrapped
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.transfer.catalog import CatalogGroup, LooseWeight, WeightCatalog
from megatron_fsdp.transfer.gather import Addition

__all__ = ["LoraMerge"]

_PEFT_PREFIX = "base_model.model."


@dataclass(slots=True)
class LoraMerge:
    """The adapters of a model, and what becomes of its names when they are merged.

    Attributes:
        renamed: names here and names of the merged model. dropped: names that the merged model does not have.
        additions: the addition to each weight, by name.
        whole: the whole adapter weights by the parameter's ``id``, which a stream fills in before its first gather.
    """

    renamed: dict[str, str] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    additions: dict[str, Addition] = field(default_factory=dict)
    whole: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> LoraMerge:
        """Find the adapters of peft's layers.

        Raises:
            ConfigError: there are none, or some that are no sum with the weight (DoRA, a bias of the adapter).
        """
        merge, found = cls(), False
        plain = unwrapped(model)
        names = [canonical(name) for name, _ in plain.named_parameters(remove_duplicate=False)]
        for path, module in plain.named_modules():
            prefix = canonical(f"{path}.") if path else ""
            if callable(getattr(module, "get_delta_weight", None)) and hasattr(module, "base_layer"):
                merge._take_layer(prefix, module, names)
                found = True
            elif hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
                merge._take_saved_module(prefix, module, names)
        if not found:
            raise ConfigError(
                "weight_stream(merge_lora=True): the model has no LoRA layer of peft's. fix: leave merge_lora out"
            )
        for name in names:
            there = merge.renamed.get(name, name)
            merge.renamed[name] = there.removeprefix(_PEFT_PREFIX)
        return merge

    def _take_layer(self, prefix: str, module: Any, names: list[str]) -> None:
        base = f"{prefix}base_layer."
        for name in names:
            if name.startswith(base):
                self.renamed[name] = prefix + name.removeprefix(base)
            elif name.startswith(prefix):
                self.dropped.add(name)
        if module.merged:
            return
        for adapter in module.active_adapters:
            variants = getattr(module, "lora_variant", {})
            if adapter in variants or getattr(module, "use_dora", {}).get(adapter, False):
                raise ConfigError(
                    f"layer {prefix[:-1]!r}: adapter {adapter!r} is a variant of LoRA (DoRA or another) whose merge is "
                    "more than a sum. fix: weight_stream(model), which sends the adapters as they are, or train with "
                    "use_dora=False"
                )
            if getattr(module, "lora_bias", {}).get(adapter, False):
                raise ConfigError(
                    f"layer {prefix[:-1]!r}: adapter {adapter!r} has a bias (lora_bias=True), which is not merged "
                    "here. fix: weight_stream(model), which sends the adapters as they are"
                )
        adapters = [each for each in module.active_adapters if _has_adapter(module, each)]
        if adapters and not module.disable_adapters:
            self.additions[f"{base}weight"] = functools.partial(self._delta, module, adapters)

    def _take_saved_module(self, prefix: str, module: Any, names: list[str]) -> None:
        active = module.active_adapters[0] if getattr(module, "active_adapters", None) else module.active_adapter
        kept = f"{prefix}modules_to_save.{active}."
        for name in names:
            if name.startswith(kept):
                self.renamed[name] = prefix + name.removeprefix(kept)
            elif name.startswith(prefix):
                self.dropped.add(name)

    def _delta(self, module: Any, adapters: list[str], dtype: torch.dtype) -> torch.Tensor:
        layer = _with_whole_weights(module, self.whole.__getitem__)
        # Add adapters in peft's order.
        found: torch.Tensor = layer.get_delta_weight(adapters[0])
        if len(adapters) > 1:
            raise ConfigError(
                f"{len(adapters)} adapters are active at once ({', '.join(adapters)}), which a stream cannot merge. "
                "fix: model.set_adapter(name) with one of them"
            )
        # Round like peft: except for embeddings, layers add FP32 products to bf16 weights and round once.
        return found.detach().to(dtype) if isinstance(module.base_layer, nn.Embedding) else found.detach()

    def adapters(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters that additions read."""
        wanted = {name for name in self.dropped if "lora_" in name}
        return [p for name, p in unwrapped(model).named_parameters() if canonical(name) in wanted]

    def rest(self, catalog: WeightCatalog) -> WeightCatalog:
        """Return the catalog without the adapters."""
        groups = tuple(
            CatalogGroup(each.group, tuple(weight for weight in each.weights if weight.name not in self.dropped))
            for each in catalog.groups
        )
        loose: Iterator[LooseWeight] = (weight for weight in catalog.loose if weight.name not in self.dropped)
        return WeightCatalog(groups, tuple(loose), catalog.ranks)


def _has_adapter(module: Any, adapter: str) -> bool:
    return any(adapter in getattr(module, kind, {}) for kind in ("lora_A", "lora_embedding_A"))


def _with_whole_weights(module: nn.Module, whole: Callable[[int], torch.Tensor]) -> Any:
    """Return a stand-in for a layer whose adapters' parameters are whole; the base layer is unchanged."""
    stand_in: Any = object.__new__(type(module))
    vars(stand_in).update(vars(module))
    vars(stand_in)["_parameters"] = {
        name: None if param is None else nn.Parameter(whole(id(param)), requires_grad=False)
        for name, param in module._parameters.items()
    }
    vars(stand_in)["_modules"] = {
        name: child if child is None or name == "base_layer" else _with_whole_weights(child, whole)
        for name, child in module._modules.items()
    }
    return stand_in
