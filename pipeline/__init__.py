"""The library behind the stages: no work at import, no concrete path."""
