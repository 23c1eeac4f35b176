"""Units of measurement: dimensions and factors of what stands behind a value."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction
from typing import NamedTuple

# Words that change the value beside them, or say another one.
CHANGING = re.compile(
    r"\b(?:\w+n['’]t|not?|never|n?either|nor|cannot|none|without|false|wrong|incorrect|unlikely|less|more|greater|fewer"
    r"|than|larger|smaller|higher|lower|above|below|under|over|least|most|between|beyond|exceeds?|half|halves|twice|double"
    r"|triple|thrice|dozens?|pairs?|squared|cubed|factorial|roots?|power|times|plus|minus|divided|multiplied|modulo"
    r"|remainder|except|instead|unless|if|negative|reciprocal|inverse|thirds?|fourths?|quarters?|fifths?|tenths?|through"
    r"|\w*(?:hundred|thousand|million|billion)(?:th)?s?|to|until|maybe|perhaps|point|choose|infinity|and|or|zero|one|two"
    r"|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty"
    r"|sin|cos|tan|log|ln|exp|sqrt|pi|even|odd|prime|digits?|mod)\b",
    re.IGNORECASE,
)
_SIGNS = "\x03 dollar € euro £ pound ¥ yen ₹ rupee ¢ cent USD usd Rs rupee"
CURRENCIES = dict(zip(*[iter(_SIGNS.split(" "))] * 2))
# For each dimension: units with their factors. All other words are units of their own.
_TABLE = """
length m=1 meter=1 metre=1 km=1000 kilometer=1000 kilometre=1000 dm=1/10 cm=1/100 centimeter=1/100 centimetre=1/100
length mm=1/1000 millimeter=1/1000 nm=1/1000000000 inch=127/5000 ft=381/1250 foot=381/1250 feet=381/1250
length yd=1143/1250 yard=1143/1250 mi=201168/125 mile=201168/125
mass g=1 gram=1 gm=1 kg=1000 kilogram=1000 mg=1/1000 ton=1000000 tonne=1000000
mass lb=45359237/100000 pound=45359237/100000 oz=45359237/1600000 ounce=45359237/1600000
time s=1 sec=1 second=1 ms=1/1000 min=60 minute=60 h=3600 hr=3600 hour=3600 day=86400 wk=604800 week=604800
month month=1 mo=1 yr=12 year=12 decade=120
volume L=1 l=1 liter=1 litre=1 ltr=1 mL=1/1000 ml=1/1000 milliliter=1/1000 millilitre=1/1000
money dollar=100 usd=100 cent=1
- of=1 the=1 a=1 an=1 in=1
degree degree=1 deg=1
radian radian=1 rad=1
rupee rupee=1 rs=1
"""
_NAMED = "J N W Pa V A K Hz kW kWh MHz GHz mph kph rpm MB GB kB nos sqft pc pt qt gal doz qty tsp px cup"
_FACTORS = {name: (name, Fraction(1)) for name in _NAMED.split()}
for _dimension, *_units in map(str.split, _TABLE.strip().splitlines()):
    for _name, _, _factor in (one.partition("=") for one in _units):
        _FACTORS[_name] = (_dimension.strip("-"), Fraction(_factor))
_FACTORS |= {name.lower(): found for name, found in _FACTORS.items() if len(name) > 1}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}


class Measure(NamedTuple):
    """A product of units: its `factor`, and the powers of its dimensions and of other words, with a blank before."""

    factor: Fraction
    powers: frozenset[tuple[str, int]]


def _find(word: str) -> tuple[str, Fraction] | None:
    forms = (word, word.lower(), word.lower().removesuffix("s"), word.lower().removesuffix("es"))
    return next((_FACTORS[name] for name in forms[: 4 if len(word) > 1 else 1] if name in _FACTORS), None)


def known_unit(word: str) -> bool:
    return _find(word) is not None or word.lower() in _POWERS


def unit(words: list[str]) -> Measure | None:
    """The unit that the words are: `km`, `/`, `h`, `^2`; None for no words."""
    factor, powers, last, sign, power = Fraction(1), Counter[str](), "", 1, 1
    for word in re.findall(r"/|\^-?\d|[^/^\s]+", " ".join(words)) if words != ["in"] else ["inch"]:
        if word in ("/", "per"):
            sign = -1
        elif word.lower() in _POWERS:
            power = _POWERS[word.lower()]
        else:
            times, last = (int(word[1:]) - 1, last) if word[0] == "^" else (power, word)
            name, by = _find(last) or (f" {last.lower().removesuffix('s')}".rstrip(), Fraction(1))
            factor *= by ** (sign * times)
            powers[name] += sign * times
            power = 1
    return Measure(factor, frozenset(one for one in powers.items() if all(one))) if words else None


def conversion(a: Measure | None, b: Measure | None) -> Fraction | None:
    """The factor from unit a to unit b, 1 where one of them is left out; None where they differ."""
    if a is None or b is None:
        return Fraction(1)
    same = a.powers <= b.powers or b.powers <= a.powers
    same = same and all(name[0] == " " for name, _ in a.powers ^ b.powers)
    return a.factor / b.factor if same else None
