"""Starting and ending the ranks of a run on some engine."""
