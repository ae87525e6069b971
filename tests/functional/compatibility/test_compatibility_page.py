"""docs/compatibility.md has a row for every name of FSDP2, FSDP1 and Megatron-FSDP, and each row has tests.

``tests.json`` lists the tests of each row: the head of the table, then the row's first cell.
"""

import functools
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import pytest
import torch.distributed.fsdp as fsdp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import _fully_shard

import megatron_fsdp
from megatron_fsdp.integrations.megatron.fully_shard_model import ACCEPTED, fully_shard_model
from megatron_fsdp.integrations.megatron.module import MegatronFSDP
from tests.functional.compatibility import agreements, differences
from tests.functional.compatibility.program import PROGRAMS, SINCE_2_15, has_name

__all__ = ["agreements", "differences"]

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "compatibility.md"
TESTS = Path(__file__).with_name("tests.json")
VERDICTS = ("same", "differs", "refused", "no effect")
# Arguments of Megatron-FSDP's fully_shard_model and MegatronFSDP, as its documentation lists them.
MEGATRON_ARGUMENTS = """
    module device_mesh dp_shard_dim dp_outer_dim tp_dim hybrid_fsdp_group hybrid_fsdp_expt_group expt_device_mesh
    fsdp_group_ag expt_fsdp_group_ag fsdp_unit_modules zero_dp_strategy outer_dp_sharding_strategy device
    init_model_with_meta_device mixed_precision_policy overlap_grad_reduce overlap_param_gather
    sync_model_each_microbatch preproc_state_dict_for_dcp_ckpt report_nan_in_param_grad average_in_collective
    disable_bucketing calculate_per_token_loss keep_fp8_transpose_cache nccl_ub fsdp_double_buffer
    fsdp_db_use_persist_buf_on_alloc_fail disable_symmetric_registration enable_fine_grained_param_gather
    use_decoupled_grad cuda_graph_mode maxpool_double_buffer""".split()
MEGATRON_METHODS = """no_sync sync set_model_auto_sync start_param_sync start_grad_sync finish_grad_sync scale_gradients
    zero_grad_buffer install_optimized_model_weights broadcast_params synchronize_param_gather
    synchronize_gradient_reduce attach_grad_to_optimizer_state mixed_precision_context reset_mixed_precision_policy
    get_distributed_index all_gather_and_wait_parameters_ready""".split()


@dataclass(frozen=True)
class Row:
    """A row of a table, as a list of cells."""

    name: str
    verdict: str
    note: str


@functools.cache
def tables() -> dict[str, list[Row]]:
    """Return the rows of every table, by the text of its first column's head."""
    found: dict[str, list[Row]] = {}
    rows: list[Row] = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|") or line.startswith("|---"):
            continue
        name, verdict, note = (cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|"))
        if (verdict, note) == ("Here", "What to know"):
            rows = found.setdefault(name.strip("`"), [])
        else:
            rows.append(Row(name, verdict, note))
    return found


def listed_tests() -> dict[str, dict[str, list[str]]]:
    """Return the tests of each row, by its table and its first cell."""
    found: dict[str, dict[str, list[str]]] = json.loads(TESTS.read_text(encoding="utf-8"))
    return found


def names(table: str) -> set[str]:
    """Return the names that a table's first column has, with ``owner(keyword)`` for each keyword in parentheses."""
    found = set()
    for row in tables()[table]:
        for name in re.findall(r"`([^`]+)`", row.name):
            owner, _, keywords = name.partition("(")
            found |= {owner} | {f"{owner}({keyword})" for keyword in keywords.rstrip(")").split(", ") if keyword}
    return found


def installed() -> Iterator[str]:
    """Yield FSDP2's exported names, the fields and methods of its classes, and the parameters of its functions."""
    for name in _fully_shard.__all__:
        yield name
        value = getattr(fsdp, name)
        if is_dataclass(value):
            yield from (f"{name}({field.name})" for field in fields(value))
        elif not isinstance(value, type):
            yield from (f"{name}({parameter})" for parameter in inspect.signature(value).parameters)
        elif value is not fsdp.FSDPModule:
            yield from (f"{name}.{method}" for method in vars(value) if not method.startswith("_"))
    yield "replicate"
    yield from (f"replicate({parameter})" for parameter in inspect.signature(replicate).parameters)
    for name, method in inspect.getmembers(fsdp.FSDPModule, inspect.isfunction):
        if name in ("_apply", "__new__"):
            continue
        yield f"FSDPModule.{name}"
        for parameter in list(inspect.signature(method).parameters)[1:]:
            yield f"FSDPModule.{name}({parameter})"


def test_everything_that_the_installed_fsdp2_offers_has_a_row() -> None:
    assert set(installed()) - names("torch.distributed.fsdp") == set()


# Names that exist in every version, but in no list.
UNLISTED = {"fully_shard.state", "fully_shard.state(module)"}


@pytest.mark.skipif(not has_name(SINCE_2_15), reason="older versions lack names that the page has")
def test_every_name_on_the_page_is_one_of_fsdp2() -> None:
    assert names("torch.distributed.fsdp") - set(installed()) == UNLISTED


# The page writes None for these defaults, and they mean the same.
DEFAULT_POLICIES = ("mp_policy", "offload_policy")


def test_every_call_that_fsdp2_takes_means_the_same_here() -> None:
    assert set(_fully_shard.__all__) <= set(megatron_fsdp.__all__)
    for name in _fully_shard.__all__:
        theirs, ours = getattr(fsdp, name), getattr(megatron_fsdp, name)
        pairs = [] if isinstance(theirs, type) and not is_dataclass(theirs) else [(theirs, ours)]
        if isinstance(theirs, type):
            methods = [key for key, value in vars(theirs).items() if inspect.isfunction(value) and key[0] != "_"]
            pairs += [(getattr(theirs, method), getattr(ours, method)) for method in methods]
        for pair in pairs:
            wanted, found = (list(inspect.signature(each).parameters.values()) for each in pair)
            by_name = {parameter.name: parameter for parameter in found}
            for position, parameter in enumerate(wanted):
                mine = by_name[parameter.name]
                assert mine.kind in (parameter.kind, inspect.Parameter.POSITIONAL_OR_KEYWORD), (pair, parameter)
                assert parameter.name in DEFAULT_POLICIES or mine.default == parameter.default, (pair, parameter)
                if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
                    assert found[position].name == parameter.name, pair


def test_every_setting_of_fsdp1_has_a_row() -> None:
    found = {name.partition("=")[0].partition(".")[0] for name in names("FSDP1")}
    assert set(list(inspect.signature(fsdp.FullyShardedDataParallel.__init__).parameters)[1:]) - found == set()
    strategies = {f"sharding_strategy={name}" for name in fsdp.ShardingStrategy.__members__}
    precision = {f"mixed_precision.{f.name}" for f in fields(fsdp.MixedPrecision) if not f.name.startswith("_")}
    assert (strategies | precision) - names("FSDP1") == set()


def test_every_argument_and_method_of_megatron_fsdp_has_a_row() -> None:
    ours = [name for name in inspect.signature(fully_shard_model).parameters if name != "accepted"]
    assert {*MEGATRON_ARGUMENTS, *ours, *(each.name for each in ACCEPTED)} - names("fully_shard_model") == set()
    assert set(MEGATRON_ARGUMENTS) == {*ours, *(each.name for each in ACCEPTED)}
    own = {name for name in vars(MegatronFSDP) if not name.startswith("_")}
    assert set(MEGATRON_METHODS) == own == names("MegatronFSDP")


def test_the_page_gives_the_reason_that_the_log_gives() -> None:
    found = {row.name: (row.verdict, row.note.replace("`", "").lower()) for row in tables()["fully_shard_model"]}
    assert {each.name: found[f"`{each.name}`"] for each in ACCEPTED} == {
        each.name: ("no effect", f"{each.reason.lower()}.") for each in ACCEPTED
    }


def test_every_row_has_one_of_four_verdicts_and_says_what_differs() -> None:
    rows = [row for rows in tables().values() for row in rows]
    assert [row for row in rows if row.verdict not in VERDICTS] == []
    assert [row for row in rows if row.verdict != "same" and not row.note] == []


def test_every_row_has_tests() -> None:
    listed = {table: list(rows) for table, rows in listed_tests().items()}
    assert listed == {table: [row.name for row in rows] for table, rows in tables().items()}
    assert [row for rows in listed_tests().values() for row, tests in rows.items() if not tests] == []


def test_every_test_of_a_row_exists_and_every_program_has_a_row() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    existing = {name for text in texts for name in re.findall(r"^ *def (test_\w+)\(", text, re.MULTILINE)}
    programs = {
        f"test_{'both_engines_agree' if one.differs is None else 'engines_do_as_documented'}[{name}]"
        for name, one in PROGRAMS.items()
    }
    listed = {test for rows in listed_tests().values() for tests in rows.values() for test in tests}
    assert listed - existing - programs == set()
    assert programs - listed == set()
