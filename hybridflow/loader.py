"""PromptLoader."""
