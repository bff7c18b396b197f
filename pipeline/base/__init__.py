"""The base model: four sources, one result that needs no network."""
