"""From two layouts to moves of pieces.

`plan` is the entry, and counts the cost. `intersection` finds who holds and needs what, `routing` who sends to whom,
`chunks` when and in which message.
"""
