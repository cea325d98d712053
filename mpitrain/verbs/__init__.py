"""The verbs of the command line, a file each: `HELP`, `add_arguments(parser)`, and `run(options, process)`, its exit status.

A verb imports its dependencies when it runs: all verbs are imported for each command.
"""
