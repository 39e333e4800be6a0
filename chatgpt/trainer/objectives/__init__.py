"""Methods that learn from a fixed list of records, an `Objective` and its trainer each: SFT, reward models, pairs, KTO,
ILQL."""
