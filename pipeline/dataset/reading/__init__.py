"""Raw files of any form to records, each a row with its place or a reason why there is none."""
