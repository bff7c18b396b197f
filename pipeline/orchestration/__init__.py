"""Running the pipeline: `dag` reads and drives DVC, `flow` wraps it in Prefect, `status` tells from files how it stands."""
