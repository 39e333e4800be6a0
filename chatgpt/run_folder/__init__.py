"""What a run leaves in its folder, and reading it again. No torch: a page or a command that reads needs none."""
