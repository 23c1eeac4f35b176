"""Computes from two layouts the moves of pieces.

`plan` is the entry and counts the cost. `intersection` finds the pieces with their holders and receivers, `routing` the
sender of each, `chunks` the round and message.
"""
