"""FP32 main weights in two halves: the same training to the bit, in 14 bytes per parameter."""

import gc
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dbuffer import CollectiveCall, memory_meter, observe_collectives
from megatron_fsdp import (
    AdamW,
    ConfigError,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    explain,
    fully_shard,
    fully_shard_optimizer,
    materialize,
)
from tests.functional.adamw_comparison import groups_of
from tests.functional.split_weights import (
    BF16,
    FP32,
    PLAIN,
    SPLIT,
    full_weights,
    make_adamw,
    one_layer,
    rounding_ties_away,
    train_on_two_microbatches,
)
from tests.harness import on_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import Block, Model, Stack, draw_tokens, inputs, loss_of, make_model, world_mesh
from tests.harness.oracle import differing, sharded, sharded_model

EVERY_LAYOUT = [
    *(("optim_grads_params", (size,)) for size in (1, 3, 4)),
    ("optim_grads", (2,)),
    ("optim", (3,)),
    ("no_shard", (2,)),
    ("hsdp", (2, 2)),
    ("hfsdp", (2, 2)),
]
QUICK = [("optim_grads_params", (3,)), ("no_shard", (2,))]
LAYOUTS = nightly_but(QUICK, EVERY_LAYOUT)


def run_of(
    policy: MixedPrecisionPolicy, strategy: str, mesh: tuple[int, ...], num_steps: int
) -> tuple[list[float], Model]:
    model = sharded_model(strategy, mesh=mesh, mp_policy=policy)
    return train_on_two_microbatches(model, make_adamw(model), range(num_steps), dist.get_rank()), model


RUNS = nightly_but(
    ((*layout, 8) for layout in QUICK), ((*layout, steps) for layout in EVERY_LAYOUT for steps in (8, 22))
)


@pytest.mark.parametrize(("strategy", "mesh", "num_steps"), RUNS, ids=str)
@on_ranks(lambda mesh: torch.Size(mesh).numel())
def test_losses_and_weights_equal_those_of_fp32_main_weights_to_the_bit(
    strategy: str, mesh: tuple[int, ...], num_steps: int
) -> None:
    initial = full_weights(sharded_model(strategy, mesh=mesh))
    seen, model = run_of(SPLIT, strategy, mesh, num_steps)
    with rounding_ties_away():
        wanted, oracle = run_of(PLAIN, strategy, mesh, num_steps)
    assert all(p.dtype is BF16 for p in model.parameters() if p.requires_grad)
    assert all(p.dtype is FP32 for p in oracle.parameters())
    moved = differing(full_weights(model), initial)
    assert len(moved) == sum(parameter.requires_grad for parameter in model.parameters())
    assert ["losses and norms"] * (seen != wanted) + differing(full_weights(model), full_weights(oracle)) == []


class Weight(nn.Module):
    def __init__(self, bits: list[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(FP32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


TIES = [0x3F808000, 0x3F818000, 0xBF808000, 0x3F807FFF, 0x3F808001]


@on_ranks(1)
def test_only_ties_between_two_bf16_weights_round_differently_away_from_zero() -> None:
    ulp = 2.0**-7
    split, plain = Weight(TIES), Weight(TIES)
    fully_shard(split, mp_policy=SPLIT)
    fully_shard(plain, mp_policy=PLAIN)
    one = torch.ones(len(TIES))
    split, plain = split(one).float().tolist(), plain(one).float().tolist()
    assert split == [1 + ulp, 1 + 2 * ulp, -1 - ulp, 1.0, 1 + ulp]
    assert plain == [1.0, 1 + 2 * ulp, -1.0, 1.0, 1 + ulp]


@on_ranks(3)
def test_materialize_draws_the_values_that_fp32_main_weights_get() -> None:
    found = []
    for policy in (PLAIN, SPLIT):
        with torch.device("meta"):
            model = Stack(Block(), Block(hidden=1))
        sharded(model, mesh=world_mesh(), mp_policy=policy)
        torch.manual_seed(7)
        materialize(model)
        assert all(p.dtype is (BF16 if policy is SPLIT else FP32) for p in model.parameters())
        found.append(full_weights(model))
    assert differing(found[1], found[0]) == []


@on_ranks(2)
def test_offloading_changes_no_bit() -> None:
    found = []
    for offload in (None, CPUOffloadPolicy(pin_memory=False)):
        model = sharded_model(mp_policy=SPLIT, offload_policy=offload)
        train_on_two_microbatches(model, make_adamw(model), range(3), dist.get_rank())
        found.append(full_weights(model))
    assert differing(found[0], found[1]) == []


@pytest.mark.parametrize(("strategy", "mesh"), LAYOUTS, ids=str)
@on_ranks(lambda mesh: torch.Size(mesh).numel())
def test_bytes_equal_explains_and_are_12_per_parameter_if_all_is_sharded(strategy: str, mesh: tuple[int, ...]) -> None:
    gc.collect()
    meter = memory_meter()
    before = meter.current_bytes
    model = make_model()
    model.shift.requires_grad_(True)
    sharded(model, strategy, mesh=mesh, mp_policy=SPLIT)
    report = explain(model)
    optimizer = AdamW(model.parameters(), lr=0.01)
    calls: list[CollectiveCall] = []
    found: dict[str, object] = {}
    for step in range(2):
        calls.clear()
        resting = meter.current_bytes
        with observe_collectives(calls.append):
            tokens = draw_tokens(dist.get_rank(), step)
            meter.reset_peak()
            loss = loss_of(model(tokens), tokens)
            found["forward"] = meter.peak_bytes - resting
            meter.reset_peak()
            loss.backward()
            found["backward"] = meter.peak_bytes - resting
            optimizer.step()
        optimizer.zero_grad()
    sizes, predicted_sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for call in calls:
        sizes[call.kind, call.axis] += call.num_bytes
    for total in report.collectives:
        predicted_sizes[total.kind, total.axis] += total.num_bytes
    moments = [value for values in optimizer.state.values() for value in values.values()]
    found["moments"] = sum((value.to_local() if isinstance(value, DTensor) else value).nbytes for value in moments)
    # The meter counts the flat moments too, padding included.
    groups = groups_of(model)
    flat_moments = sum(8 * group.main_weight.local_buffer.numel() for group in groups)
    found |= {"resting": meter.current_bytes - before - flat_moments, "traffic": sizes}
    wanted: dict[str, object] = {
        "forward": report.forward_peak.num_bytes, "backward": report.backward_peak.num_bytes,
        "moments": report.optimizer_bytes, "resting": report.persistent_bytes, "traffic": predicted_sizes,
    }  # fmt: skip
    numel = sum(group.plan.numel for group in groups)
    per_element = (report.persistent_bytes + flat_moments) * torch.Size(mesh).numel() / numel
    assert found == wanted
    if strategy == "optim_grads_params":
        assert per_element == 12.0


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "copy_": lambda weight: torch.no_grad()(weight.copy_)(torch.randn_like(weight)),
    ".data": lambda weight: weight.data.copy_(torch.randn_like(weight)),
    "nn.init": nn.init.normal_,
}


@pytest.mark.parametrize("how", WRITES)
@on_ranks(3)
def test_a_weight_that_is_written_to_has_no_lower_half_and_the_others_keep_theirs(how: str) -> None:
    model = one_layer()
    before = full_weights(model)
    WRITES[how](model.layers[0].get_parameter("up.weight"))
    after = full_weights(model)
    rounded = {name for name, value in after.items() if torch.equal(value, value.to(BF16).float())}
    assert differing(after, before) == ["layers.0.up.weight"]
    assert rounded == {"layers.0.norm.weight", "layers.0.norm.bias", "layers.0.up.weight"}


@on_ranks(2)
def test_a_loaded_bf16_state_dict_is_stepped_without_remainders() -> None:
    model, optimizers, oracle = one_layer(), [], one_layer(PLAIN)
    torch.manual_seed(11)
    state = {name: torch.randn(value.shape).to(BF16) for name, value in model.state_dict().items()}
    for each in (model, oracle):
        optimizers.append(AdamW(each.parameters(), lr=0.01))
        each.load_state_dict(state if each is model else {name: value.float() for name, value in state.items()})
        with rounding_ties_away():
            each(inputs(dist.get_rank(), 0)).square().mean().backward()
        optimizers[-1].step()
    assert differing(full_weights(model), full_weights(oracle)) == []


@on_ranks(1)
def test_a_change_without_a_version_counter_is_kept_to_half_an_ulp() -> None:
    model = one_layer()
    group = groups_of(model)[0]
    weight = group.main_weight.get_local_tensor(list(group.parameters).index("up.weight"))
    new = torch.randn_like(weight)
    # NumPy's memory has no version counter.
    torch.from_numpy(weight.view(torch.int16).numpy()).copy_(new.view(torch.int16))
    value = group.weights.values().get_local_tensor(list(group.parameters).index("up.weight"))
    assert torch.equal(weight, new)
    assert not torch.equal(value, new.float())
    assert float(((value - new.float()).abs() / (new.float().abs() * 2.0**-7)).max()) <= 0.5


@pytest.mark.parametrize("is_wrapped", [False, True], ids=["as it is", "wrapped"])
@on_ranks(2)
def test_main_grad_may_be_fp32(is_wrapped: bool) -> None:
    found = []
    for is_split in (True, False):
        policy = MixedPrecisionPolicy(BF16, FP32, main_grads_dtype=FP32, split_main_params=is_split)
        model = sharded_model(mp_policy=policy)
        optimizer = make_adamw(model)
        if is_wrapped:
            fully_shard_optimizer(optimizer)
        with rounding_ties_away():
            train_on_two_microbatches(model, optimizer, range(4), dist.get_rank())
        found.append(full_weights(model))
    assert differing(found[0], found[1]) == []


@pytest.mark.parametrize("wrap", [False, True], ids=["in its step", "when it is wrapped"])
@on_ranks(1)
def test_another_optimizer_is_refused_with_the_parameters_name_and_the_fix(wrap: bool) -> None:
    model = one_layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = full_weights(model)
    model(inputs(0, 0)).square().mean().backward()
    with pytest.raises(ConfigError, match=r"SGD: parameter 'norm.weight' of unit 'layers.0'.*megatron_fsdp.AdamW"):
        fully_shard_optimizer(optimizer) if wrap else optimizer.step()
    assert differing(full_weights(model), before) == []


@on_ranks(1)
def test_split_weights_are_found_in_a_param_group_that_is_added_later() -> None:
    whole, split = one_layer(PLAIN), one_layer()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for model in (whole, split):
        model(inputs(0, 0)).square().mean().backward()
    optimizer.step()
    optimizer.add_param_group({"params": list(split.parameters())})
    with pytest.raises(ConfigError, match="split_main_params=True"):
        optimizer.step()


@on_ranks(2)
def test_frozen_parameters_have_no_remainder_and_train_in_fp32_once_unfrozen() -> None:
    model = sharded_model(mp_policy=SPLIT)
    has_remainder = [group.weights.remainder is not None for group in groups_of(model)]
    model.shift.requires_grad_(True)
    before = full_weights(model)
    train_on_two_microbatches(model, make_adamw(model), range(2), dist.get_rank())
    is_shift_trained = any(name == "shift" for name in differing(full_weights(model), before))
    assert sorted(has_remainder) == [False, True, True, True]
    assert is_shift_trained
