"""Run folder, doctor, report, comparison by people, publishing. Imports no torch."""
