"""The state of a run as whole named tensors: on disk, in the memory of nodes, in an object store."""
