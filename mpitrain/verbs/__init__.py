"""The verbs of the command line, a file each: `HELP`, `add_arguments(parser)`, and `run(options, process)`, its exit status.

What a verb needs it imports when it runs: all of them are imported for each command.
"""
