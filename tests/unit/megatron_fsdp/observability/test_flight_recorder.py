"""The ranks' reports become a message that names the rank that differs or hangs."""

from collections.abc import Sequence

import pytest

from megatron_fsdp.formatting import rank_list
from megatron_fsdp.observability.flight_recorder import Journal, RankState, verdict


def journal(actions: Sequence[str]) -> Journal:
    found = Journal()
    for action in actions:
        found.append(action)
    return found


def state(actions: Sequence[str], *, waits: bool = True, place: str = "standing at a.py:3 in load") -> RankState:
    return journal(actions).state(waits=waits, place=place)


def test_the_first_action_that_differs_is_named_with_the_ranks_on_each_side() -> None:
    common = ["gather a", "use a"]
    states = {
        0: state([*common, "gather b", "reduce b"]),
        1: state([*common, "gather c"]),
        2: state([*common, "gather b"]),
        3: state([*common, "gather b"]),
    }
    assert verdict(states, "why:") == (
        "why:\n  the ranks took different branches at action 2, after gather 'a':\n"
        "  ranks 0, 2-3: gather 'b'\n  rank 1: gather 'c'"
    )


def test_a_difference_at_the_very_first_action_has_nothing_before_it() -> None:
    text = verdict({0: state(["gather a"]), 1: state(["reduce a"])}, "why:")
    assert "different branches at action 1:\n  rank 0: gather 'a'\n  rank 1: reduce 'a'" in text


def test_actions_that_depend_on_a_ranks_data_are_not_compared() -> None:
    states = {0: state(["gather a", "use a", "reshard a", "gather b"]), 1: state(["gather a", "use a", "gather b"])}
    assert "different branches" not in verdict(states, "why:")
    assert journal(["gather a", "fold a"]).digest == journal(["gather a"]).digest


@pytest.mark.parametrize("other", [["gather b", "gather a"], ["gather a"], ["gather a", "gather c"]])
def test_other_actions_give_another_digest_or_count(other: list[str]) -> None:
    mine, theirs = journal(["gather a", "gather b"]), journal(other)
    assert (mine.digest, mine.count) != (theirs.digest, theirs.count)


def test_a_difference_before_the_recorded_actions_is_reported_as_older() -> None:
    later = ["gather a"] * 300
    states = {0: state(["gather b", *later]), 1: state(["gather c", *later]), 2: state(["gather b", *later])}
    text = verdict(states, "why:")
    assert "before the last 256 actions: ranks 0, 2; rank 1 agree among themselves" in text


def test_a_missing_rank_is_shown_with_its_position_and_the_others_next_actions() -> None:
    states = {0: state(["gather a", "gather b", "use b"]), 1: state(["gather a"], waits=False)}
    text = verdict(states, "why:")
    assert "rank 0: waiting in use 'b' (action 2), for 0 s" in text
    assert "rank 1: standing at a.py:3 in load, after gather 'a' (action 1); the others went on with gather 'b'" in text


def test_ranks_that_all_wait_in_one_place_blame_the_network() -> None:
    states: dict[int, RankState | None] = {0: state(["gather a", "use a"]), 1: state(["gather a", "use a"])}
    assert "the network or the devices do not make progress" in verdict(states, "why:")
    states[1] = state(["gather a", "use a"], waits=False)
    assert "the network" not in verdict(states, "why:")


def test_a_rank_without_an_answer_is_named() -> None:
    text = verdict({0: state(["gather a"]), 1: None, 2: None}, "why:")
    assert "ranks 1-2: no answer; the process ended or its machine cannot be reached" in text
    assert verdict({0: None}, "why:").startswith("why:\n  rank 0: no answer")


def test_ranks_are_listed_as_runs() -> None:
    assert rank_list([4]) == "rank 4"
    assert rank_list([7, 0, 1, 2, 5]) == "ranks 0-2, 5, 7"


def test_a_state_survives_the_store() -> None:
    mine = state(["gather ä", "reduce b"], waits=False)
    assert RankState.from_json(mine.to_json()) == mine
    assert (mine.action(0), mine.action(1), mine.action(2)) == ("gather ä", "reduce b", None)


def test_only_the_newest_actions_are_kept() -> None:
    mine = journal([f"gather {number}" for number in range(5000)]).state(waits=True, place="")
    assert (mine.count, len(mine.recent), mine.action(4999), mine.action(100)) == (5000, 256, "gather 4999", None)
