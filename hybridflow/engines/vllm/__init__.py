"""Generation with vLLM inside the training processes: `engine` is the entry, `engine_loop` runs requests, `layout` says
where weights lie (of other models, `discovery`).
"""
