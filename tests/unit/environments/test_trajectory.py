"""Each sampled token is in exactly one row of its trajectory, as it was sampled."""

from hypothesis import given
from hypothesis import strategies as st

from hybridflow.environments.trajectory import NO_TURN, Trajectory

ids = st.lists(st.integers(0, 3), max_size=4)


@st.composite
def conversations(draw):
    """Turns of an agent that continues, goes back to an earlier prompt, or begins anew."""
    past, turns = [[*draw(ids), 0]], []
    for number in range(draw(st.integers(1, 6))):
        given_ids = [*draw(st.sampled_from(past)), *draw(ids)]
        said = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
        turns.append((given_ids, said, [-1.0 - number] * len(said), [number] * len(said)))
        past += [given_ids, given_ids + said]
    return turns


@given(conversations())
def test_each_sampled_token_is_in_one_row_after_the_ids_that_the_model_saw(turns):
    one = Trajectory()
    for turn in turns:
        one.add(*turn)
    assert one.turns == len(turns)
    found = {}
    for row in one.rows:
        assert (
            len({*map(len, (row.token_ids, row.response_mask, row.log_probs, row.policy_version, row.turn_ids))}) == 1
        )
        for at, turn in enumerate(row.turn_ids):
            assert row.response_mask[at] == (turn != NO_TURN)
            if turn == NO_TURN:
                assert row.log_probs[at] == 0.0
                continue
            if turn not in found:
                found[turn] = ([*row.prompt_ids, *row.token_ids[:at]], [], [], [])
            for values, value in zip(found[turn][1:], (row.token_ids, row.log_probs, row.policy_version), strict=True):
                values.append(value[at])
    assert [found[number] for number in range(len(turns))] == [(g, list(s), lp, v) for g, s, lp, v in turns]


@given(conversations())
def test_a_conversation_that_only_continues_is_one_row(turns):
    one, seen = Trajectory(), []
    for given_ids, said, *rest in turns:
        seen = seen + given_ids
        one.add(seen, said, *rest)
        seen = seen + said
    (row,) = one.rows
    assert [*row.prompt_ids, *row.token_ids] == seen
    assert row.prompt_ids == turns[0][0]


def test_a_turn_at_another_temperature_begins_a_row():
    one = Trajectory()
    one.add([1], [2], [-1.0], [0], temperature=0.5)
    one.add([1, 2, 3], [4], [-1.0], [0], temperature=0.0625)
    one.add([1, 2, 5], [6], [-1.0], [0], temperature=0.5)
    assert [(row.prompt_ids, row.token_ids, row.temperature) for row in one.rows] == [
        ([1], [2, 5, 6], 0.5),
        ([1, 2, 3], [4], 0.0625),
    ]
