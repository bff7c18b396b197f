"""What a model does on held-out rows: loss and answers."""
