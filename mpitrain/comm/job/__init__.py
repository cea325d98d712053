"""The job: how ranks start, how the job ends when one fails, signals and clocks."""
