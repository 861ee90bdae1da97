"""Model families: one file per lineage."""
