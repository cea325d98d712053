"""Smaller models: low-bit formats, masks, cut channels, factors, adapters. It knows modules, and no run."""
