"""Written solutions, right and wrong, that go on behind their answer, hide it beside other numbers or stop early."""

from __future__ import annotations

SUM = "16 - 7 = 9\n9 * 2 = 18"
TWO = "<<9*2=18>>18"

# (solution, reference): a heading of Markdown is no answer in the style of the data set
HEADINGS_RIGHT = [
    ("#### Total eggs: 16\nShe uses 3+4=7.\n#### Eggs sold: 9\n9*2=18\n\nThe answer is 18.", "18"),
    ("#### Eggs sold: 9\n9*2=18\n\nSo she makes **$18**.", "18"),
    ("### Solution\n\n#### Calculation of 9 eggs\n9*2=18\n\n#### Conclusion\nJanet earns $18.", "18"),
    ("#### Cost for 3 shirts\n3*6 = 18\n\n#### Final Answer\n18", "18"),
    ("#### Conclusion\n18", "18"),
    ("9*2 = 18\n#### Eggs sold: 18", "18"),
    ("#### The total is 18", "18"),
    ("#### The total is 18\n\nI hope this helps!", "18"),
    ("#### Result: 18\n\nShe sells 9 eggs.", "18"),
    ("#### about 18\n\nShe sells 9 eggs.", "18"),
    ("#### USD 18\n\nShe sells 9 eggs.", "18"),
    ("#### $18\n\nShe sells 9 eggs.", "18"),
    ("#### x = 18\n\nShe sells 9 eggs.", "18"),
    ("#### Answer: \\boxed{18}\n\nShe sells 9 eggs.", "18"),
]
HEADINGS_WRONG = [
    ("#### Eggs sold: 9\n9*2=18\n\nSo she makes **$18**.", "9"),
    ("#### Eggs sold: 18\n9*2=20\n\nSo she makes $20.", "18"),
    ("#### 20\n\nShe sells 18 eggs.", "18"),
]

# another problem follows, whose words are not second thoughts; second thoughts are
RUN_ON_RIGHT = [
    (f"{TWO}\n#### 18\n\nTom must wait 5 minutes. How long is it actually?\n5+1=<<5+1=6>>6\n#### 6", "18"),
    (f"{TWO}\n#### 18\n\nSam has 5 pens. He buys 1. How many?\nLet's add: 5+1=<<5+1=6>>6\n#### 6", "18"),
    (f"{TWO}\n#### 18\n\nA test has 5 wrong answers and 1 mistake. How many?\n5+1=<<5+1=6>>6\n#### 6", "18"),
]
RUN_ON_WRONG = [
    (f"#### 6\n\nJanet must wait. How much does she make, actually?\n{TWO}\n#### 18", "18"),
    (f"#### 6\n\nJanet has 9 eggs. They are $2 each. How much?\nLet's see: {TWO}\n#### 18", "18"),
]

# the answer comes behind a reason, and as what a number is rounded to
REASONS_RIGHT = [
    ("This gives 17.6, but since we can't have a fraction of a bus, she needs 18 buses.", "18"),
    ("This gives 17.6, and because a bus is whole, she needs 18 of them.", "18"),
    ("This gives 17.6; however, since half a bus is none, she needs 18.", "18"),
    ("The answer is 17.5, so she has 17.5 dollars.", "17.5"),
    ("The answer is 17.6, so 40 people do not fit.", "17.6"),
    ("The answer is 18, so 9 eggs were sold.", "18"),
    ("The answer is 18 or 17.", "18"),
]
REASONS_WRONG = [
    ("This gives 18, but since a bus is full at 40, she needs 20 buses.", "18"),
    ("The answer is 17 or 18.", "18"),
]

# the last sentence relates the answer to other numbers
CIRCUMSTANCES_RIGHT = [
    ("20% of 90 is 18.", "18"),
    ("It takes 3 hours and 30 minutes, i.e. 210 minutes in total.", "210"),
    ("He bought 3 shirts for $18.", "18"),
    ("He bought 3 shirts for 18 dollars.", "18"),
    ("She sold 13 on Monday and 5 on Tuesday, for 18 in total.", "18"),
    ("She has 5 left and needs to buy 18 more.", "18"),
    ("The price rises from 5 to 18.", "18"),
    ("Subtract 5 from 23 to get 18.", "18"),
    ("In 3 years he will be 18.", "18"),
    ("He paid 3 workers a total of $18.", "18"),
    ("Tom is 23 years old now, and in 5 years he will be 28.", "28"),
    ("He arrives in 18 minutes.", "18"),
]
CIRCUMSTANCES_WRONG = []

# what follows the answer checks it, or is a courtesy
CHECKS_RIGHT = [
    ("So y = 9.\nLet's verify: 9*3 = 27, which is wrong.\nSo y = 18.", "18"),
    ("Janet has 16 eggs.\nLet's check how much she makes:\n9*2 = 18", "18"),
    ("Let's verify: 9*2 = 18", "18"),
]
CHECKS_WRONG = []

# a solution without annotations that was cut short has no final answer
CUT_SHORT = [
    (f"{SUM}\n####", "18"),
    (f"{SUM}\n#### ", "18"),
    (f"{SUM}\n18 + 4 =", "18"),
    (f"{SUM}\nShe pays 4 +", "18"),
    (f"{SUM}\nShe pays $18 - $4 = $", "18"),
    ("It costs 9 * 2", "18"),
]

# numbers in other scripts and with blanks
WRITTEN_RIGHT = [
    ("答案是18。", "18"),
    ("答案：18", "18"),
    ("因此，她每天赚18美元。", "18"),
    ("9*2 = 18。所以答案为18。她有9个鸡蛋。", "18"),
    ("所以一共有3个盒子，共１８个苹果。", "18"),
    ("Ответ: 18", "18"),
    ("She earns 1 080 000.", "1080000"),
    ("She earns 10 000 dollars.", "10000"),
    ("It has 2 100 gram packs.", "100"),
    ("The temperature is – 5°C.", "-5"),
    ("It is 2×18", "18"),
]
WRITTEN_WRONG = [
    ("答案是20。", "18"),
    ("Это слово18", "18"),
    ("She earns 1 080 000.", "0"),
    ("The temperature is – 5°C.", "5"),
]

RIGHT = HEADINGS_RIGHT + RUN_ON_RIGHT + REASONS_RIGHT + CIRCUMSTANCES_RIGHT + CHECKS_RIGHT + WRITTEN_RIGHT
WRONG = HEADINGS_WRONG + RUN_ON_WRONG + REASONS_WRONG + CIRCUMSTANCES_WRONG + CHECKS_WRONG + WRITTEN_WRONG + CUT_SHORT
