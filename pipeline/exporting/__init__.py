"""From a checkpoint's shards to a model folder that loads anywhere, and the proof that it is the trained model."""
