"""What a run is (params) and where it runs (profile): typed, strict, without defaults."""
