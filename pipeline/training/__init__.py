"""The one training function, what it needs on every rank, and how a stage starts and resumes it."""
