"""Forecasts of a run, made before it starts."""
