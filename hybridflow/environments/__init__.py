"""Agents that act over several turns, and what they say as rows to train on.

Read in this order: `tool_calls` and `rendering` (messages to token ids and back, never rendering sampled tokens again),
`trajectory` (turns to rows), `conversation` (the model as an agent sees it), `acting` (the loops of tools, environments
and programs), `session_process` and `sessions` (where they run, and the host that answers them).
"""
