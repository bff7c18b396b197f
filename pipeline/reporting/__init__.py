"""What a person reads: pages and terminal views, made from files; no stage depends on it."""
