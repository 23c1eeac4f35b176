"""From two layouts to moves of pieces.

`plan` is the entry. `intersection` finds who holds and needs what, `routing` who sends to whom, `chunks` when and in
which message, `order` the order on one rank; `traffic` says what it costs.
"""
