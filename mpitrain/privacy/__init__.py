"""Differential privacy and sums that show no addend: accountants, noise, clipping, secure sums."""
