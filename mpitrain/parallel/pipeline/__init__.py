"""The stages of a pipeline at work: the interpreter of schedules, messages between stages, tied parameters."""
