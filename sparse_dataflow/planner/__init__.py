"""What a run costs: FLOPs, bytes and rates; every other part reads its numbers from here."""
