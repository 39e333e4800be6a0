"""What a run leaves and what people read from it: run folder, doctor, report, comparison, publishing. No torch."""
