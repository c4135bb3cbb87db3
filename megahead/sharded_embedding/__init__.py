"""An embedding whose rows are sharded round-robin over all ranks, fetched before a step and updated after it."""
