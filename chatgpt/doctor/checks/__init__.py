"""What is looked for, a file per subject. A check takes the history so far and gives a finding or None."""
