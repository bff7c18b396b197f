"""From raw files to packed token sequences; imports neither torch nor transformers."""
