"""The transition between training and generation, and every other way of weights from one layout to another.

Read in this order:

1. `layout`: boxes of canonical tensors, where ranks keep them. `residency`: which tensors have memory.
2. `plan`: from two layouts to moves (`move`), through `pieces` (who holds and needs what), `routes` (who sends to
   whom) and `rounds` (when, and in which message); `traffic` says what it costs. Pure: no torch, no communication.
3. `transfer`: a plan bound to storages and run. `binding` finds the views, `terms` and `wire` agree on dtypes,
   `schedule` orders the steps, `messages` packs and sends a round, `copies` copies.
4. `hybrid_engine`: an actor's two phases, over `holders` of weights, with `designs` to choose from; `transition`,
   `way_back`, `sharing`, `overlap` and `ledger` are its parts.
"""
