"""Zeppelin (EuroSys 2026): its partitioner of documents, and its remapping between attention and linear modules."""
