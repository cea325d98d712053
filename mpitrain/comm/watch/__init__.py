"""The watcher: a process that looks at the ranks of a node and names the one that stands still, and each rank's part in it."""
