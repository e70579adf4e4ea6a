"""Records for fine-tuning: a row to a conversation (forms), a conversation through a template to parts (templates)."""
