"""What a corpus is: its sides, names, mixtures, and where its documents are stored."""
