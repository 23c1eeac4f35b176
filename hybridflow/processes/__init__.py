"""Child processes that run what may hang, crash or lie: reward functions, contained programs, agents.

`supervisor`: the owner's side. `fork_server`: the process that forks and ends workers. `channel`: their messages.
`fork_server` and `channel` import the standard library only: isolated interpreters load them, too.
"""
