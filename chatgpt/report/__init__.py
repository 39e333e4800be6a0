"""A page that shows a run, or several: curves, samples, settings, what the doctor found. One file."""
