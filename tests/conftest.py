"""Settings for the whole suite: property tests look at the same examples on every run and every machine."""

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, database=None)
settings.load_profile("ci")
