"""Offline methods, each an `Objective` and its trainer: SFT, reward models, critics, preference pairs, KTO, ILQL."""
