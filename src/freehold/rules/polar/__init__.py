"""Newton-Schulz in several forms: what ``newton_schulz`` and the rules of the Muon family compute with."""
