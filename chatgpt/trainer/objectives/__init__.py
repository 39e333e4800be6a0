"""Offline methods, each an `Objective` and its trainer: SFT, reward models, preference pairs, KTO, ILQL."""
