"""Search over passages: an index on disk, by words or by vectors, and its best passages for a query."""
