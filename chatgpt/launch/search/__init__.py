"""Sweeps: many runs of one method under settings that Optuna proposes, one folder for all of them. docs/sweep.md."""
