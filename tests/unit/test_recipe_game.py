"""The game of recipes/game.py: what it answers, and that drawn answers say nothing."""

import random

from recipes.game import NUMBERS, Game, worksheet


def test_halving_finds_every_number_with_four_guesses():
    for number in range(NUMBERS):
        game, low, high = Game(), 0, NUMBERS - 1
        assert game.reset(number) is None
        for _ in range(4):
            guess = (low + high) // 2
            answer, reward, done = game.step(str(guess))
            if done:
                break
            low, high = (guess + 1, high) if answer == "h" else (low, guess - 1)
        assert (reward, done) == (1.0, True)


def test_drawn_answers_do_not_depend_on_the_number():
    counts = []
    for number in (0, 9):
        random.seed(3)
        game = Game(shuffled=True)
        game.reset(number)
        counts.append([game.step("5")[0] for _ in range(100)])
    assert counts[0] == counts[1]
    assert 30 < counts[0].count("h") < 70


def test_a_worksheet_is_a_game_that_has_not_ended():
    rng = random.Random(0)
    for _ in range(100):
        said, (guess,) = worksheet(rng)
        assert said[0] == "?"
        assert len(said) % 3 == 1
        assert 0 <= int(guess) < NUMBERS
